#!/bin/sh
# Fetches Kafka Connect, the Iceberg sink and the Avro converter with Maven:
#   sh ops/connect/fetch.sh DIRECTORY
# makes DIRECTORY/worker (the worker's class path) and DIRECTORY/plugins (its plugin.path).
set -eu
[ $# = 1 ] || { echo "usage: sh ops/connect/fetch.sh DIRECTORY" >&2; exit 2; }
target=$1
pom=$(dirname "$0")/pom.xml
mkdir -p "$(dirname "$target")"
new=$(cd "$(dirname "$target")" && pwd)/$(basename "$target").new
rm -rf "$new"
for part in worker plugins/iceberg plugins/avro-converter; do
  mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never --file="$pom" \
    --activate-profiles="$(basename "$part")" dependency:copy-dependencies \
    -DoutputDirectory="$new/$part" -DincludeScope=runtime
done
# This converter's jar does not say what it holds, and plugin.discovery=service_load looks at
# nothing else (KIP-898). Kafka's own way: connect-plugin-path.sh sync-manifests.
python3 - "$new/plugins/avro-converter/manifest.jar" <<'EOF'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as jar:
    jar.writestr(
        "META-INF/services/org.apache.kafka.connect.storage.Converter",
        "io.apicurio.registry.utils.converter.AvroConverter\n",
    )
EOF
rm -rf "$target"
mv "$new" "$target"

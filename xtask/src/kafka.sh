# Installs Apache Kafka into the current folder: its jars by Maven, a formatted directory for each node, and an
# archive of its classes, with which it starts a second sooner. Needs mvn and Java 17.
cat > pom.xml <<'POM'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>kafka</groupId><artifactId>libs</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.3.1</version></dependency>
    <dependency><groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.25.4</version></dependency>
  </dependencies>
</project>
POM
mvn -B -ntp -q dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=libs

properties() {
  cat <<CONF
process.roles=broker,controller
node.id=$1
controller.quorum.voters=$1@127.0.0.1:$3
listeners=PLAINTEXT://127.0.0.1:$2,CONTROLLER://127.0.0.1:$3
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$PWD/$4
offsets.topic.replication.factor=1
CONF
}

java_() { java -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "$@"; }

for node in 1 2 3; do
  rm -rf "new-$node" "template-$node"
  properties "$node" 19092 19093 "new-$node" > "node-$node.properties"
  java_ -cp 'libs/*' kafka.tools.StorageTool format -t MkU3OEVBNTcwNTJENDM2Qk -c "node-$node.properties"
done

# One start and stop writes the archive. Without it the server starts as well.
rm -rf train kafka.jsa
cp -r new-1 train
properties 1 19092 19093 train > train.properties
java -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit="$PWD/kafka.jsa" -cp 'libs/*' \
  kafka.Kafka train.properties > train.log 2>&1 &
server=$!
sleep 8
kill -TERM $server || true
wait $server || true
rm -rf train train.properties

for node in 1 2 3; do mv "new-$node" "template-$node"; done

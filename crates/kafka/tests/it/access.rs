//! TLS, permissions, and servers of another version.

use std::time::Duration;

use everbus_core::Code;
use everbus_testkit::servers::{Certificates, Kafka, KafkaOptions};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::bad_input::refused;
use crate::{server, work};

// conformance: contract/kafka-tls: events go over TLS to a server whose authority is known; a server that cannot be checked, and a listener of the other kind, are refused with a hint
// needs: Kafka
#[cfg(feature = "tls")]
#[tokio::test]
async fn the_server_is_checked_and_spoken_to_with_tls() {
    if !Kafka::is_asked_for() {
        return;
    }
    let Some(certificates) = Certificates::make() else {
        return;
    };
    let Some(server) = Kafka::start(&KafkaOptions::default().tls(&certificates)) else {
        return;
    };
    let mut plain = server::options();
    plain.timeout = Duration::from_secs(5);
    let mut options = plain.clone();
    options.tls = true;
    let error = refused(&server.tls_url(), options.clone()).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error:?}");
    options.ca_file = Some(certificates.authority());
    let engine = everbus_kafka::open(&server.tls_url(), options.clone())
        .await
        .unwrap();
    work::publish(&engine, "order.placed").await;
    engine.broker.close().await.unwrap();
    // A listener with TLS hangs up on a client without it, and says nothing.
    for error in [
        refused(&server.tls_url(), plain).await,
        refused(&server.url(), options).await,
    ] {
        let hint = error.hint_text().unwrap_or_default().to_lowercase();
        assert!(hint.contains("tls"), "{error:?}");
    }
}

// conformance: contract/kafka-permission: a user without permission for a topic is refused, and told which permissions are missing
// needs: Kafka
#[tokio::test]
async fn what_a_user_may_not_do_is_said() {
    let rules = "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
                 super.users=User:broker;User:ANONYMOUS";
    let options = KafkaOptions::default().user("shop", "right").config(rules);
    let Some(server) = Kafka::start(&options) else {
        return;
    };
    let url = server.url().replace("kafka://", "kafka://shop:right@");
    let error = refused(&url, server::options()).await;
    assert_eq!(error.code(), Code::InvalidSetting, "{error:?}");
    let hint = error.hint_text().unwrap_or_default();
    assert!(hint.contains("permissions"), "{error:?}");
}

/// Answers each request for the versions that the server speaks, as a server does that refuses those of the client.
async fn refuse_versions(mut client: TcpStream) -> std::io::Result<()> {
    loop {
        let length = client.read_u32().await?;
        let mut request = vec![0; usize::try_from(length).unwrap_or(0)];
        client.read_exact(&mut request).await?;
        // The number of the request, UNSUPPORTED_VERSION, and no versions.
        let answer = [&request[4..8], &35_i16.to_be_bytes(), &0_i32.to_be_bytes()].concat();
        client
            .write_u32(u32::try_from(answer.len()).unwrap_or(0))
            .await?;
        client.write_all(&answer).await?;
    }
}

// conformance: contract/kafka-version: a cluster that refuses the version of the client is said to do so, with a hint
#[tokio::test]
async fn a_server_of_another_version() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(refuse_versions(client));
        }
    });
    let mut options = server::options();
    options.timeout = Duration::from_secs(4);
    let error = refused(&format!("kafka://127.0.0.1:{port}"), options).await;
    assert_eq!(error.code(), Code::Unsupported, "{error:?}");
    serving.abort();
}

//! TLS by files: a real client, and files that do not fit.

use std::path::PathBuf;
use std::sync::Arc;

use everbus::{Bus, Code};
use everbus_server::{Server, ServerOptions, Tls};
use everbus_testkit::servers::Certificates;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::api::Api;

fn tls(cert: PathBuf, key: PathBuf) -> Option<Tls> {
    Some(Tls { cert, key })
}

/// Asks over TLS, trusting one authority.
async fn ask(api: &Api, authority: PathBuf) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(authority).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(api.address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await?;
    let body = r#"{"type":"a.b"}"#;
    let request = format!(
        "POST /v1/events HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

// needs: openssl
// conformance: operations/tls: a server with certificate and key speaks TLS to a client that trusts its authority, and to no other
#[tokio::test]
async fn a_client_publishes_over_tls() {
    let (Some(ours), Some(others)) = (Certificates::make(), Certificates::make()) else {
        return;
    };
    let api = Api::over_tls(tls(ours.certificate(), ours.key())).await;
    let answer = ask(&api, ours.authority()).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    let refused = ask(&api, others.authority()).await.unwrap_err();
    assert!(refused.to_string().contains("certificate"), "{refused}");
    // Plain HTTP gets no answer of HTTP, and the server goes on.
    let mut plain = TcpStream::connect(api.address).await.unwrap();
    plain
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await
        .unwrap();
    let mut bytes = Vec::new();
    let _ = plain.read_to_end(&mut bytes).await;
    assert!(!bytes.starts_with(b"HTTP/1.1 2"), "{bytes:?}");
    ask(&api, ours.authority()).await.unwrap();
    api.stop().await;
}

// needs: openssl
// conformance: operations/tls-files: a key of another certificate, or a file that is none, is refused at start and named
#[tokio::test]
async fn files_that_do_not_fit_are_refused_and_named() {
    let (Some(ours), Some(others)) = (Certificates::make(), Certificates::make()) else {
        return;
    };
    let missing = ours.folder().join("missing.pem");
    for (files, named) in [
        (tls(ours.certificate(), others.key()), "server.pem"),
        (tls(ours.certificate(), ours.certificate()), "server.pem"),
        (tls(ours.certificate(), missing.clone()), "missing.pem"),
        (tls(missing, ours.key()), "missing.pem"),
        (tls(ours.key(), ours.key()), "server.key"),
    ] {
        let bus = Bus::open("memory:").await.unwrap();
        let mut options = ServerOptions::default();
        options.listen = "127.0.0.1:0".parse().unwrap();
        options.tls = files;
        let error = Server::bind(bus, None, options).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidSetting, "{error:?}");
        assert!(error.message().contains(named), "{error:?}");
        assert!(error.hint_text().is_some(), "{error:?}");
    }
}

//! Accepts connections, with TLS, within limits: their number, and the time for their headers.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use everbus::{Code, Error, Result};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::guard::{self, Connection, Peer};
use crate::options::Tls;
use crate::state::AppState;
use crate::timer::ConnectionTimer;

/// The headers of a request, all together, have at most this many bytes.
const HEADER_BYTES: usize = 64 * 1024;
/// How long the server waits for running requests when it stops.
const DRAIN: Duration = Duration::from_secs(25);
/// The pause after a failed accept, for example without a free file descriptor.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves until the server stops, then lets running requests finish.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsAcceptor>,
    state: &AppState,
) {
    let limits = &state.options().limits;
    let seats = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = state.stopping() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept(&listener, &seats) => accepted,
        };
        let (stream, peer, seat) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(target: "everbus::http", %error, "a connection could not be accepted");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (router, tls, state) = (router.clone(), tls.clone(), state.clone());
        connections.spawn(async move {
            let _seat = seat;
            let _ = stream.set_nodelay(true);
            match tls {
                None => converse(stream, peer, router, &state).await,
                Some(tls) => {
                    let limit = state.options().limits.header_timeout;
                    if let Ok(Ok(stream)) = tokio::time::timeout(limit, tls.accept(stream)).await {
                        converse(stream, peer, router, &state).await;
                    }
                }
            }
        });
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, all).await.is_err() {
        tracing::warn!(target: "everbus::http", "requests were cut off: they took longer than the shutdown waits");
    }
}

type Accepted = (TcpStream, Peer, tokio::sync::OwnedSemaphorePermit);

async fn accept(listener: &TcpListener, seats: &Arc<Semaphore>) -> io::Result<Accepted> {
    // The permit is taken before the accept: connections over the limit wait in the queue of the operating system.
    let seat = seats.clone().acquire_owned().await;
    let seat = seat.map_err(io::Error::other)?;
    let (stream, address) = listener.accept().await?;
    Ok((stream, Peer(address), seat))
}

/// Serves the requests of one connection.
async fn converse<S>(stream: S, peer: Peer, router: Router, state: &AppState)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let header_timeout = state.options().limits.header_timeout;
    let timer = ConnectionTimer::new(header_timeout);
    let connection = Connection {
        peer,
        timer: timer.clone(),
        caller: None,
    };
    let service = service_fn(|mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(connection.clone());
        let served = guard::around(state, router.clone(), request.map(Body::new));
        async { Ok::<_, Infallible>(served.await) }
    });
    let connection = http1::Builder::new()
        .timer(timer)
        .header_read_timeout(header_timeout)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = state.stopping() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(target: "everbus::http", %error, "a connection ended early");
    }
}

/// Reads the certificate and the key.
pub(crate) fn acceptor(tls: &Tls) -> Result<TlsAcceptor> {
    let bad = |what: &str, path: &std::path::Path, error: &dyn std::fmt::Display| {
        let what = format!("the {what} {} cannot be used: {error}", path.display());
        Error::new(Code::InvalidSetting, what)
            .hint("the certificate and its key are two files in PEM")
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(&tls.cert)
        .and_then(Iterator::collect)
        .map_err(|e| bad("certificate", &tls.cert, &e))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|e| bad("key", &tls.key, &e))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|e| bad("certificate", &tls.cert, &e))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

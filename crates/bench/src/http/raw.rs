//! The bare handler: axum parses the same JSON, and answers when the bare group commit has stored it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::JoinHandle;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::post;
use everbus_core::Result;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use crate::raw::{self, Queued};
use crate::sample::{expect, wrong};
use crate::{blocking, failed};

#[derive(Deserialize)]
struct Document<'a> {
    #[serde(rename = "type")]
    _kind: &'a str,
    #[serde(borrow)]
    payload: &'a RawValue,
}

type Queue = mpsc::UnboundedSender<Queued>;

/// A bare handler that serves.
pub(super) struct Bare {
    address: SocketAddr,
    path: PathBuf,
    serving: tokio::task::JoinHandle<()>,
    writer: JoinHandle<rusqlite::Result<()>>,
}

impl Bare {
    pub(super) async fn start(path: PathBuf) -> Result<Self> {
        let (to, writer) = raw::start_group_commit(path.clone()).await?;
        let router = Router::new()
            .route("/v1/events", post(publish))
            .with_state(to);
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self {
            address,
            path,
            serving,
            writer,
        })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it, and checks that everything is stored.
    pub(super) async fn end(self, events: u64) -> Result<()> {
        self.serving.abort();
        let _ = self.serving.await;
        let (writer, path) = (self.writer, self.path);
        let stored = blocking(move || {
            raw::join(writer)?;
            raw::count(&path)
        });
        expect(
            stored.await?,
            events,
            "events are stored by the bare handler",
        )
    }
}

async fn publish(State(to): State<Queue>, body: Bytes) -> impl IntoResponse {
    let document: Document<'_> = match serde_json::from_slice(&body) {
        Ok(document) => document,
        Err(error) => return Err((StatusCode::BAD_REQUEST, error.to_string())),
    };
    let payload = Bytes::copy_from_slice(document.payload.get().as_bytes());
    let (done, committed) = oneshot::channel();
    if to.send((payload, done)).is_err() || committed.await.is_err() {
        let what = wrong("the writer ended").to_string();
        return Err((StatusCode::INTERNAL_SERVER_ERROR, what));
    }
    Ok((StatusCode::CREATED, "{\"published\":1}"))
}

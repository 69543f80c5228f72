//! Ctrl-C, and SIGTERM, with which a supervisor ends a process. Both are remembered from the moment the
//! command begins, so that none is missed between two waits.

use tokio::sync::watch;

/// Whether the person, or a supervisor, asked the process to end.
#[derive(Clone)]
pub(crate) struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Begins to listen. From now on the signals no longer end the process by themselves.
    pub(crate) fn listen() -> Self {
        let (to, from) = watch::channel(false);
        tokio::spawn(async move {
            signalled().await;
            to.send_replace(true);
            // A second signal ends the process without waiting.
            tokio::select! {
                () = signalled() => std::process::exit(130),
                () = to.closed() => {}
            }
        });
        Self(from)
    }

    pub(crate) fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until the process was asked to end.
    pub(crate) async fn wait(&self) {
        if self.0.clone().wait_for(|set| *set).await.is_err() {
            // The listening task has ended, so no signal will be noticed: wait for ever.
            std::future::pending::<()>().await;
        }
    }
}

async fn signalled() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => return,
                Ok(()) = tokio::signal::ctrl_c() => return,
            }
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

//! The system in a directory of its own, and a reader of what it published.

use std::time::{Duration, Instant};

use everbus::{Cursor, Recorded, TypedEvent};
use omni::events::{MessageContent, MessageReceived, Sender};
use omni::{App, Settings};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// A running system.
pub(crate) struct System {
    pub(crate) app: App,
    settings: Settings,
    _directory: tempfile::TempDir,
}

impl System {
    /// One system on each engine of this build, empty at first.
    pub(crate) async fn everywhere() -> Vec<Self> {
        let mut systems = vec![Self::on_a_file().await];
        #[cfg(feature = "nats")]
        systems.extend(Self::on_nats().await.map(|(system, _)| system));
        systems
    }

    /// On a real NATS server, with a file beside it; and the URL of the server. `None`, with a message, without one.
    #[cfg(feature = "nats")]
    pub(crate) async fn on_nats() -> Option<(Self, String)> {
        let url = everbus_testkit::servers::Nats::shared()?.fresh_account();
        let directory = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}", directory.path().join("store.db").display());
        let system = Self::at(directory, url.clone(), Some(store)).await;
        Some((system, url))
    }

    async fn on_a_file() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let broker = format!("sqlite:{}", directory.path().join("omni.db").display());
        Self::at(directory, broker, None).await
    }

    async fn at(directory: tempfile::TempDir, broker: String, store: Option<String>) -> Self {
        let mut settings = Settings::new(broker, directory.path().join("identities.db"));
        settings.store = store;
        settings.retry_delay = Duration::from_millis(10);
        let app = App::start(settings.clone()).await.unwrap();
        Self {
            app,
            settings,
            _directory: directory,
        }
    }

    /// Ends the system and starts it again.
    pub(crate) async fn restart(&mut self) {
        self.app.bus.shutdown().await.unwrap();
        self.app = App::start(self.settings.clone()).await.unwrap();
    }

    /// Every event of this type, once there are `count` of them.
    pub(crate) async fn published<T: TypedEvent + DeserializeOwned>(&self, count: usize) -> Vec<T> {
        let records = self.records(T::TYPE, count).await;
        let typed = records.iter().map(|record| record.event.typed().unwrap());
        typed.collect()
    }

    /// The same as records of the log, with positions and times of receipt.
    pub(crate) async fn records(&self, event_type: &str, count: usize) -> Vec<Recorded> {
        let began = Instant::now();
        loop {
            let types = vec![event_type.parse().unwrap()];
            let log = self.app.bus.log().unwrap();
            let (records, _) = log.read(Cursor::START, types, 1000).await.unwrap();
            if records.len() >= count {
                assert_eq!(records.len(), count, "{event_type}");
                return records
                    .iter()
                    .map(|record| Recorded::clone(record))
                    .collect();
            }
            assert!(
                began.elapsed() < PATIENCE,
                "{} of {count} {event_type}",
                records.len()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

pub(crate) fn message(number: u32, channel: &str, user: &str, profile: &Value) -> MessageReceived {
    MessageReceived {
        message_id: format!("m{number}"),
        external_message_id: format!("x{number}"),
        channel: channel.into(),
        instance_id: "i1".to_owned(),
        sender: Sender {
            platform_user_id: user.to_owned(),
            platform_username: Some(user.to_owned()),
            profile_data: profile.as_object().cloned(),
        },
        conversation_id: None,
        external_conversation_id: format!("c {user}"),
        content: MessageContent::text(format!("text {number}")),
        platform_timestamp: "2026-01-02T03:04:05Z".parse().unwrap(),
        raw_payload: Some(json!({ "body": format!("text {number}") })),
    }
}

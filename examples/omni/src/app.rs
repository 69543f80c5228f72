//! The whole system on one bus.

use std::path::PathBuf;
use std::time::Duration;

use everbus::{Bus, BusBuilder, Router, Streams, TypedEvent, to};

use crate::agent::{self, Agent};
use crate::channel;
use crate::events::{AgentRequest, MediaReceived, MessageReceived, MessageSending};
use crate::identity::{self, IdentityService};
use crate::media::{self, FixedPipeline, MediaPipeline, RETRIES, RETRY_DELAY};
use crate::sessions;

/// The name of this service, the `source` of its events.
pub const SOURCE: &str = "omni";

/// The settings and the exchangeable parts of the system.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The URL of the broker: `sqlite:omni.db`, `nats://…`.
    pub broker: String,
    /// The URL of the store, for a broker that cannot be queried.
    pub store: Option<String>,
    /// The file with persons and accounts.
    pub identities: PathBuf,
    /// Turns files into text.
    pub pipeline: MediaPipeline,
    /// Answers messages.
    pub agent: Agent,
    /// The wait before a file is tried again.
    pub retry_delay: Duration,
}

impl Settings {
    /// The built-in pipeline and agent.
    pub fn new(broker: impl Into<String>, identities: impl Into<PathBuf>) -> Self {
        Self {
            broker: broker.into(),
            store: None,
            identities: identities.into(),
            pipeline: MediaPipeline::new(FixedPipeline::default()),
            agent: Agent::echo(),
            retry_delay: RETRY_DELAY,
        }
    }

    fn builder(&self) -> everbus::Result<BusBuilder> {
        let builder = Bus::builder().source(SOURCE).streams(streams()?);
        Ok(match &self.store {
            Some(store) => builder.store(store),
            None => builder,
        })
    }
}

/// The streams of the specification. On the wire their events are the JSON of its envelope, so that programs
/// without Everbus read and write them.
fn streams() -> everbus::Result<Streams> {
    let streams = Streams::omni();
    let streams = streams.iter().cloned();
    Streams::new(streams.map(|stream| stream.dialect("omni")))
}

/// The running system.
#[derive(Clone)]
pub struct App {
    /// Its bus.
    pub bus: Bus,
    /// Persons and accounts.
    pub identities: IdentityService,
}

impl App {
    /// Opens the bus and the tables, mounts the handlers and starts.
    pub async fn start(
        settings: Settings,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let bus = settings.builder()?.open(&settings.broker).await?;
        let identities = IdentityService::open(&settings.identities)?;
        bus.mount(router(&bus, &settings, identities.clone())?)
            .await?;
        bus.start().await?;
        Ok(Self { bus, identities })
    }
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("App")
    }
}

fn router(bus: &Bus, settings: &Settings, identities: IdentityService) -> everbus::Result<Router> {
    let delay = settings.retry_delay;
    let process = to(media::process)
        .group("media-processor")
        .retry_with(move |policy| policy.max_retries(RETRIES).base_delay(delay));
    let answer = to(agent::answer)
        .group("agent")
        .retry_with(move |policy| policy.max_retries(RETRIES).base_delay(delay));
    Ok(Router::new()
        .on(
            MessageReceived::TYPE,
            to(identity::resolve).group("identity-resolver"),
        )
        .on(
            MessageReceived::TYPE,
            to(media::announce).group("media-announcer"),
        )
        .on(MessageReceived::TYPE, to(sessions::note).group("sessions"))
        .on(MediaReceived::TYPE, process)
        .on(AgentRequest::TYPE, answer)
        .on(
            MessageSending::TYPE,
            to(channel::send).group("channel-sender"),
        )
        .with_state(identities)
        .with_state(settings.pipeline.clone())
        .with_state(settings.agent.clone())
        .with_state(bus.kv(sessions::BUCKET)?)
        .with_state(bus.clone()))
}

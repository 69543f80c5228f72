//! Publishing: what is checked before an event is taken, and how it reaches the engine.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use everbus_core::{Appended, Code, Error, Event, IntoEvent, REPLAY_OF, Result};

use super::{Bus, Shared};
use crate::admission::Admitted;
use crate::ambient;
use crate::guard;
use crate::overflow::Objects;
use crate::runtime::options::TRAVELS;
use crate::runtime::receipt::{About, Receipt};
use crate::stats::Published;

impl Bus {
    /// Publishes an event and returns when it is durable.
    ///
    /// Takes an [`Event`], a builder, a pair of type and serialisable value, or a
    /// [document](crate::Dialect::document) of a dialect. An event whose id was
    /// published before with the same body returns the first receipt and stores nothing.
    ///
    /// An error says by its [`class`](Error::class) what to do next. `Passing`: nothing was stored, and the
    /// same publish may succeed later. `Unknown` ([`outcome_unknown`](Error::outcome_unknown)): the event
    /// may have been stored; publish it again **with the same id**, and where the engine recognises
    /// repeated ids it is stored once. So an event that may have to be repeated is built once, with its
    /// id, and cloned:
    ///
    /// ```
    /// # use everbus::{Bus, Event, Result};
    /// # async fn place(bus: &Bus) -> Result<()> {
    /// let event = Event::builder("orders.order.placed").json(&42).build()?;
    /// while let Err(error) = bus.publish(event.clone()).await {
    ///     if !error.class().may_repeat() {
    ///         return Err(error);
    ///     }
    ///     tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn publish<E: IntoEvent>(
        &self,
        event: E,
    ) -> impl Future<Output = Result<Receipt>> + Send + use<'_, E> {
        let event = self.accept(event);
        async move {
            let mut receipts = self.append(vec![event?]).await?;
            receipts.pop().unwrap_or_else(|| Err(no_answer()))
        }
    }

    /// Publishes events in one step: all of them or none, where the engine's
    /// [`Capabilities::atomic_batch`] says so. Receipts come in the order of the events.
    pub fn publish_batch<I>(
        &self,
        events: I,
    ) -> impl Future<Output = Result<Vec<Receipt>>> + Send + use<'_, I>
    where
        I: IntoIterator,
        I::Item: IntoEvent,
    {
        let events: Result<Vec<Event>> = events.into_iter().map(|e| self.accept(e)).collect();
        async move {
            let events = events?;
            if events.is_empty() {
                return Ok(Vec::new());
            }
            self.append(events).await?.into_iter().collect()
        }
    }

    fn accept(&self, event: impl IntoEvent) -> Result<Event> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        let rust_type = event.rust_type();
        let event = event.into_event()?;
        shared.check_event(&event, rust_type)?;
        Ok(event)
    }

    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<Receipt>>> {
        // Checked before anything else: the future may have been kept over a shutdown.
        self.accepts()?;
        let source = self.inner.shared.options.source.as_ref();
        let events = events
            .into_iter()
            .map(|event| ambient::inherit(event, source))
            .collect::<Result<Vec<_>>>()?;
        let about: Vec<About> = events.iter().map(About::of).collect();
        let answers = self.append_as_is(events).await?;
        if answers.len() != about.len() {
            return Err(no_answer());
        }
        let receipts = answers
            .into_iter()
            .zip(about)
            .map(|(answer, about)| Ok(Receipt::new(answer?, about, self.inner.shared.clone())));
        Ok(receipts.collect())
    }

    /// Whether an event that comes out of an outbox would be published.
    #[cfg(feature = "sqlite")]
    pub(crate) fn check_relayed(&self, event: &Event) -> Result<()> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        shared.check_event(event, None)
    }

    /// Appends events that were checked, as a publish does, and take nothing over from where they are
    /// published: what surrounds a relay or a replay is not what surrounded them.
    pub(crate) async fn append_as_is(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        // Held until the append is over. Boxed where it is needed: most publishes are without limits, and their
        // futures should be small.
        let mut admitted = Admitted::default();
        if shared.admission.is_limited() {
            let depth = shared.engine.depth.as_deref();
            let admitting = shared.unless_ending(shared.admission.admit(depth, &events));
            admitted = Box::pin(admitting).await?;
        }
        for (event_type, dropped) in admitted.dropped() {
            guard::log(|| {
                shared.stats.publishing(event_type).dropped(*dropped);
                tracing::warn!(target: "everbus::bus", %event_type, dropped, "old events were skipped to make room for new ones");
            });
        }
        // After every wait: an object is referred to soon after it was put there.
        let over = |objects: &Arc<Objects>| events.iter().any(|event| objects.is_over(event));
        let events = if shared.objects.as_ref().is_some_and(over) {
            Box::pin(shared.unless_ending(shared.offload(events))).await?
        } else {
            events
        };
        shared.append(events).await
    }
}

impl Shared {
    /// Whether an event may be stored: its stream, its size, and its schema where there is one. A payload that was
    /// just serialised from the very type the schema comes from is not checked again.
    pub(crate) fn check_event(&self, event: &Event, rust_type: Option<&str>) -> Result<()> {
        let objects = self.objects.as_ref().filter(|objects| objects.moves());
        let most = objects.map_or(TRAVELS, |objects| objects.limit());
        self.check_within(most, event, rust_type)
    }

    /// Whether an event may be stored that is never split: it is made inside a transaction.
    pub(crate) fn check_unsplit(&self, event: &Event) -> Result<()> {
        self.check_within(TRAVELS, event, None)
    }

    fn check_within(&self, most: usize, event: &Event, rust_type: Option<&str>) -> Result<()> {
        check_not_reserved(event)?;
        self.check_stream(event)?;
        let limit = self.options.max_payload.unwrap_or(most);
        let bytes = event.payload().len();
        if bytes > limit {
            return Err(Error::new(
                Code::PayloadTooLarge,
                format!("the payload has {bytes} bytes, the limit is {limit}"),
            )
            .hint("store large data elsewhere and publish where it is, or raise max_payload"));
        }
        if event.overflow().is_some() {
            return Err(Error::new(
                Code::InvalidAttribute,
                "the event was read with a part of its payload in an object store",
            )
            .hint("publish the whole event: Bus::whole gives it"));
        }
        if self.validates.load(Ordering::Acquire) {
            self.schemas().check_published(event, rust_type)?;
        }
        Ok(())
    }

    /// Whether a stream covers the type of an event.
    pub(crate) fn check_stream(&self, event: &Event) -> Result<()> {
        let streams = &self.options.streams;
        if streams.is_declared() {
            streams.route(event.event_type())?;
        }
        Ok(())
    }

    /// The events as they shall be appended: the large parts of those that are too large are in the
    /// object store, durably.
    pub(crate) async fn offload(&self, mut events: Vec<Event>) -> Result<Vec<Event>> {
        let Some(objects) = &self.objects else {
            return Ok(events);
        };
        for event in &mut events {
            if objects.is_over(event) {
                // Boxed: hardly any publish needs the room.
                *event = Box::pin(objects.offload(event.clone())).await?;
            }
        }
        Ok(events)
    }

    /// Appends events that have been accepted, and counts them.
    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        self.declare_streams().await?;
        // A recorder of metrics is other people's code, and the event is stored whatever it does.
        let counts = guard::contain(|| Published::new(&self.stats, &events));
        let appended = self.engine.broker.append(events).await;
        match &appended {
            Ok(answers) => {
                let _ = guard::contain(|| counts.map(|counts| counts.stored(answers)));
                for error in answers.iter().filter_map(|answer| answer.as_ref().err()) {
                    self.fail_if_fatal(error);
                }
            }
            Err(error) => {
                self.fail_if_fatal(error);
            }
        }
        appended
    }

    /// Appends an event of the bus itself.
    pub(crate) async fn append_one(&self, event: Event) -> Result<()> {
        self.accepts()?;
        only_answer(self.append(vec![event]).await?).map(drop)
    }
}

/// Refuses the types of the bus itself: those who subscribe to `system.dead_letter` rely on it. A copy of such
/// an event is the operator's wish.
fn check_not_reserved(event: &Event) -> Result<()> {
    let is_reserved = event.event_type().starts_with("system.");
    if !is_reserved || event.metadata().contains_key(REPLAY_OF) {
        return Ok(());
    }
    Err(Error::new(
        Code::InvalidType,
        format!(
            "{:?} is a type of the bus itself: those that begin with system. are reserved",
            event.event_type()
        ),
    )
    .hint("choose a type of your own, such as ops.alert.raised"))
}

/// What the engine answered for the one event that it was given.
pub(crate) fn only_answer(mut answers: Vec<Result<Appended>>) -> Result<Appended> {
    answers.pop().unwrap_or_else(|| Err(no_answer()))
}

fn no_answer() -> Error {
    Error::new(Code::Internal, "the engine did not answer for every event").with_unknown_outcome()
}

//! Publishing: the checks before an event is accepted, and how the event reaches the engine.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use everbus_core::{Appended, Class, Code, Error, Event, IntoEvent, REPLAY_OF, Result};

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
    /// The [`class`](Error::class) of an error says what to do next. `Passing`: nothing was stored, and the
    /// same publish may succeed later. `Unknown` ([`outcome_unknown`](Error::outcome_unknown)): the event
    /// may have been stored; publish it again **with the same id**, and an engine that recognises repeated
    /// ids stores it once. An event that may have to be repeated is therefore built once, with its id, and
    /// cloned:
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
    /// [`Capabilities::atomic_batch`](crate::Capabilities::atomic_batch) says so. Receipts come in the order of the events.
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
        // Checked here, not before the future is made: a shutdown may begin before the first poll.
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

    /// Checks whether an event of an outbox may be published.
    #[cfg(feature = "sqlite")]
    pub(crate) fn check_relayed(&self, event: &Event) -> Result<()> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        shared.check_event(event, None)
    }

    /// The largest accepted payload in bytes: [`BusOptions::max_payload`](crate::BusOptions::max_payload), or else
    /// the limit of the object store, or else 1 MiB.
    pub fn max_payload(&self) -> usize {
        let shared = &self.inner.shared;
        shared.options.max_payload.unwrap_or_else(|| shared.most())
    }

    /// Appends events that were checked, as a publish does, but adds no ambient values (correlation id,
    /// trace): a relay or a replay must not add the values of its own task.
    pub(crate) async fn append_as_is(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let shared = &self.inner.shared;
        shared.accepts()?;
        // The admission is held until the append is over. Its future is boxed, so that publishes without
        // limits, which are most, have a small future.
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
        // Done after every wait, so that the event that refers to the object is stored soon after it.
        let over = |objects: &Arc<Objects>| events.iter().any(|event| objects.is_over(event));
        if shared.objects.as_ref().is_some_and(over) {
            return Box::pin(shared.append_split(events)).await;
        }
        shared.append(events).await
    }
}

impl Shared {
    /// Checks whether an event may be published: its type is not reserved, a stream covers it, its payload is
    /// complete and not too large, and its schema accepts it. A payload that was just serialised from the Rust
    /// type of the schema is not checked against the schema.
    pub(crate) fn check_event(&self, event: &Event, rust_type: Option<&str>) -> Result<()> {
        self.check_within(self.most(), event, rust_type)
    }

    /// The largest accepted payload if the options set none: the limit of the object store, or else
    /// [`TRAVELS`].
    fn most(&self) -> usize {
        let objects = self.objects.as_ref();
        objects.and_then(|o| o.limit()).unwrap_or(TRAVELS)
    }

    /// Like [`check_event`](Self::check_event), for an event whose payload cannot be moved to the object
    /// store, because the event is published in the transaction of an ack.
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
            .hint("publish the whole event: Bus::whole returns it"));
        }
        if self.validates.load(Ordering::Acquire) {
            self.schemas().check_published(event, rust_type)?;
        }
        Ok(())
    }

    /// Checks that a stream covers the type of an event, if streams are declared.
    pub(crate) fn check_stream(&self, event: &Event) -> Result<()> {
        let streams = &self.options.streams;
        if streams.is_declared() {
            streams.route(event.event_type())?;
        }
        Ok(())
    }

    /// Moves the large part of each event that is too large to the object store, durably, and returns the
    /// events to append.
    pub(crate) async fn offload(&self, mut events: Vec<Event>) -> Result<Vec<Event>> {
        let Some(objects) = &self.objects else {
            return Ok(events);
        };
        for event in &mut events {
            if objects.is_over(event) {
                // Boxed: hardly any publish needs this future.
                *event = Box::pin(objects.offload(event.clone())).await?;
            }
        }
        Ok(events)
    }

    /// Moves large parts to the object store, then appends. Deletes the objects of events that were surely not
    /// stored: otherwise every repeated publish of a large event would leave an object for a day.
    async fn append_split(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        let events = self.unless_ending(self.offload(events)).await?;
        let answers = self.append(events.clone()).await;
        for (n, event) in events.iter().enumerate() {
            let stored = match &answers {
                Ok(answers) => answers.get(n).map(|answer| answer.as_ref()),
                Err(error) => Some(Err(error)),
            };
            let unneeded = match stored {
                Some(Ok(appended)) => appended.duplicate,
                Some(Err(error)) => !matches!(error.class(), Class::Unknown | Class::Final),
                None => false,
            };
            if let Some(objects) = self.objects.as_ref().filter(|_| unneeded) {
                // An error is ignored: the collector deletes the object after a day.
                let _ = objects.discard(&self.engine, event).await;
            }
        }
        answers
    }

    /// Appends events that were checked and admitted, and counts them. Remembers a fatal error of the engine.
    async fn append(&self, events: Vec<Event>) -> Result<Vec<Result<Appended>>> {
        self.declare_streams().await?;
        // A metrics recorder is user code; a panic in it must not fail a publish whose event is stored.
        let counts = guard::contain(|| Published::new(&self.stats, &events));
        let begun = Instant::now();
        let appended = self.engine.broker.append(events).await;
        match &appended {
            Ok(answers) => {
                let _ = guard::contain(|| {
                    self.stats.committed(begun.elapsed());
                    counts.map(|counts| counts.stored(answers))
                });
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

    /// Appends an event that the bus itself publishes.
    pub(crate) async fn append_one(&self, event: Event) -> Result<()> {
        self.accepts()?;
        only_answer(self.append(vec![event]).await?).map(drop)
    }
}

/// Refuses event types that are reserved for the bus (`system.*`): their subscribers rely on the bus as the
/// only publisher. Copies of a replay are allowed, because an operator asked for them.
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

/// The engine's answer for a single event.
pub(crate) fn only_answer(mut answers: Vec<Result<Appended>>) -> Result<Appended> {
    answers.pop().unwrap_or_else(|| Err(no_answer()))
}

fn no_answer() -> Error {
    Error::new(Code::Internal, "the engine did not answer for every event").with_unknown_outcome()
}

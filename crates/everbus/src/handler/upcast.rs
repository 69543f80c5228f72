//! Upcasts: functions that convert an old version of an event to a newer one.
//!
//! A handler is written for the current version. An event of an older version is converted step by step; a
//! version without a step is refused, never parsed as another version.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write as _};
use std::sync::Arc;

use everbus_core::{Code, Error, Event, Result, TypedEvent};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The known steps between versions, for any number of event types.
///
/// A step is added with [`add`](Self::add), [`try_add`](Self::try_add) or
/// [`add_json`](Self::add_json); steps are followed one after another, so each old version needs
/// only the step to the next one. Contradictions are found by [`check`](Self::check), which the
/// router and the bus call before any event moves.
///
/// ```
/// use everbus::{Event, IntoEvent, Upcasts};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "users.user.created")]
/// struct UserV1 {
///     name: String,
/// }
///
/// #[derive(Serialize, Deserialize, Event)]
/// #[event(type = "users.user.created", version = 2)]
/// struct User {
///     first: String,
///     last: String,
/// }
///
/// let mut upcasts = Upcasts::new();
/// upcasts.add(|old: UserV1| {
///     let (first, last) = old.name.split_once(' ').unwrap_or((&old.name, ""));
///     User { first: first.to_owned(), last: last.to_owned() }
/// });
/// upcasts.check()?;
///
/// let event = UserV1 { name: "Ada Lovelace".to_owned() }.into_event()?;
/// assert_eq!(upcasts.read::<User>(&event)?.last, "Lovelace");
/// # Ok::<(), everbus::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Upcasts {
    by_type: BTreeMap<Box<str>, Vec<Step>>,
    /// Invalid steps that lead from one event type to another; `check` reports them.
    astray: Vec<(&'static str, &'static str)>,
}

#[derive(Clone)]
struct Step {
    from: u32,
    to: u32,
    apply: Arc<Apply>,
}

type Apply = dyn Fn(Carried<'_>) -> Result<Carried<'static>, String> + Send + Sync;

impl Upcasts {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a step from one version of an event to a higher one of the same type.
    pub fn add<Old, New, F>(&mut self, step: F) -> &mut Self
    where
        Old: TypedEvent + DeserializeOwned + 'static,
        New: TypedEvent + 'static,
        F: Fn(Old) -> New + Send + Sync + 'static,
    {
        self.add_typed::<Old, New>(Arc::new(move |old| {
            Ok(Carried::from_value(step(old.read()?)))
        }))
    }

    /// Adds a step that may fail: the event is then [`Code::InvalidPayloadError`].
    pub fn try_add<Old, New, E, F>(&mut self, step: F) -> &mut Self
    where
        Old: TypedEvent + DeserializeOwned + 'static,
        New: TypedEvent + 'static,
        E: Display,
        F: Fn(Old) -> Result<New, E> + Send + Sync + 'static,
    {
        self.add_typed::<Old, New>(Arc::new(move |old| {
            let new = step(old.read()?).map_err(|e| e.to_string())?;
            Ok(Carried::from_value(new))
        }))
    }

    /// Adds a step over plain JSON, for versions whose Rust types no longer exist. It can be chained with
    /// typed steps.
    pub fn add_json<E, F>(&mut self, event_type: &str, from: u32, to: u32, step: F) -> &mut Self
    where
        E: Display,
        F: Fn(Value) -> Result<Value, E> + Send + Sync + 'static,
    {
        let apply: Arc<Apply> = Arc::new(move |old| {
            let new = step(old.read()?).map_err(|e| e.to_string())?;
            Ok(Carried::Json(new))
        });
        self.push(event_type, Step { from, to, apply })
    }

    /// Adds all steps of another set.
    pub fn merge(&mut self, other: &Upcasts) -> &mut Self {
        for (event_type, steps) in &other.by_type {
            for step in steps {
                self.push(event_type, step.clone());
            }
        }
        self.astray.extend_from_slice(&other.astray);
        self
    }

    /// Whether there are no steps.
    pub fn is_empty(&self) -> bool {
        self.by_type.is_empty() && self.astray.is_empty()
    }

    /// Finds invalid steps: two from one version, a cycle, a step to a lower version, a step to another
    /// event type. Each is [`Code::UpcastConflict`].
    pub fn check(&self) -> Result<()> {
        if let Some((from, to)) = self.astray.first() {
            return Err(conflict(format!(
                "an upcast leads from {from:?} to another event type, {to:?}"
            )));
        }
        for (event_type, steps) in &self.by_type {
            check_steps(event_type, steps)?;
        }
        Ok(())
    }

    /// The versions that can be read as this one, in order, itself included.
    pub fn versions_read_as(&self, event_type: &str, version: u32) -> Vec<u32> {
        let steps = self.steps(event_type);
        let mut versions: Vec<u32> = steps.iter().map(|step| step.from).collect();
        versions.retain(|from| chain(steps, *from, version).is_some());
        versions.push(version);
        versions.sort_unstable();
        versions.dedup();
        versions
    }

    /// Decodes an event into a Rust type, through as many steps as its version needs.
    ///
    /// - The current version is parsed directly.
    /// - A version that no steps lead from is [`Code::UnknownVersion`].
    /// - Another event type, a payload that does not parse, and a step that refuses are
    ///   [`Code::InvalidPayloadError`].
    pub fn read<T: TypedEvent + DeserializeOwned + 'static>(&self, event: &Event) -> Result<T> {
        if event.version() == T::VERSION || event.event_type() != T::TYPE {
            return event.typed();
        }
        let Some(steps) = chain(self.steps(T::TYPE), event.version(), T::VERSION) else {
            return Err(self.unknown_version::<T>(event));
        };
        let mut carried = Carried::Bytes(event.payload());
        for step in steps {
            let next = (step.apply)(carried);
            carried = next.map_err(|why| {
                let upcast = format!("from version {} to {}", step.from, step.to);
                unreadable(event, &format!("the upcast {upcast} failed: {why}"))
            })?;
        }
        carried.read().map_err(|why| unreadable(event, &why))
    }

    fn add_typed<Old: TypedEvent, New: TypedEvent>(&mut self, apply: Arc<Apply>) -> &mut Self {
        if Old::TYPE != New::TYPE {
            self.astray.push((Old::TYPE, New::TYPE));
            return self;
        }
        let (from, to) = (Old::VERSION, New::VERSION);
        self.push(Old::TYPE, Step { from, to, apply })
    }

    fn push(&mut self, event_type: &str, step: Step) -> &mut Self {
        let steps = self.by_type.entry(event_type.into()).or_default();
        steps.push(step);
        self
    }

    fn steps(&self, event_type: &str) -> &[Step] {
        self.by_type.get(event_type).map_or(&[], Vec::as_slice)
    }

    fn unknown_version<T: TypedEvent>(&self, event: &Event) -> Error {
        let mut known = String::new();
        for version in self.versions_read_as(T::TYPE, T::VERSION) {
            let comma = if known.is_empty() { "" } else { ", " };
            let _ = write!(known, "{comma}{version}");
        }
        let what = format!(
            "the event {} is {:?} version {}, which nothing here can read; known: {known}",
            event.display_id(),
            event.event_type(),
            event.version(),
        );
        Error::new(Code::UnknownVersion, what)
            .hint("deploy what reads this version, or add an upcast, and retry the dead letter")
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} → {}", self.from, self.to)
    }
}

/// A payload between steps. Between two typed steps it stays a Rust value, so it need not survive
/// serialisation.
enum Carried<'a> {
    Bytes(&'a [u8]),
    Json(Value),
    Typed {
        value: Box<dyn Any>,
        to_json: fn(Box<dyn Any>) -> Result<Value, String>,
    },
}

impl Carried<'_> {
    fn from_value<T: TypedEvent + 'static>(value: T) -> Carried<'static> {
        Carried::Typed {
            value: Box::new(value),
            to_json: |value| match value.downcast::<T>() {
                Ok(value) => serde_json::to_value(value).map_err(|e| e.to_string()),
                Err(_) => Err("the value has another Rust type".to_owned()),
            },
        }
    }

    fn read<T: DeserializeOwned + 'static>(self) -> Result<T, String> {
        let json = match self {
            Carried::Bytes(bytes) => {
                return serde_json::from_slice(bytes).map_err(|e| e.to_string());
            }
            Carried::Json(json) => json,
            Carried::Typed { value, to_json } => match value.downcast() {
                Ok(value) => return Ok(*value),
                Err(value) => to_json(value)?,
            },
        };
        serde_json::from_value(json).map_err(|e| e.to_string())
    }
}

/// The steps from one version to another. Only steps to a higher version count, so the search always ends.
fn chain(steps: &[Step], from: u32, to: u32) -> Option<Vec<&Step>> {
    let mut path = Vec::new();
    let mut version = from;
    while version < to {
        let next = steps.iter().find(|step| step.from == version)?;
        if next.to <= version {
            return None;
        }
        version = next.to;
        path.push(next);
    }
    (version == to).then_some(path)
}

fn check_steps(event_type: &str, steps: &[Step]) -> Result<()> {
    for (index, step) in steps.iter().enumerate() {
        if steps[..index].iter().any(|other| other.from == step.from) {
            return Err(conflict(format!(
                "two upcasts of {event_type:?} begin at version {}",
                step.from
            )));
        }
    }
    for step in steps {
        if let Some(circle) = circle_from(steps, step.from) {
            return Err(conflict(format!(
                "the upcasts of {event_type:?} lead in a circle: {circle}"
            )));
        }
    }
    match steps.iter().find(|step| step.to <= step.from) {
        Some(Step { from, to, .. }) => Err(conflict(format!(
            "the upcast of {event_type:?} from version {from} leads down to version {to}"
        ))),
        None => Ok(()),
    }
}

/// `1 → 2 → 1`, if the steps form a cycle from `start`.
fn circle_from(steps: &[Step], start: u32) -> Option<String> {
    let mut text = start.to_string();
    let mut version = start;
    // A path with more steps than exist would repeat one.
    for _ in steps {
        version = steps.iter().find(|step| step.from == version)?.to;
        let _ = write!(text, " → {version}");
        if version == start {
            return Some(text);
        }
    }
    None
}

fn conflict(what: String) -> Error {
    Error::new(Code::UpcastConflict, what)
        .hint("one function per old version, each to a higher version of the same type")
}

fn unreadable(event: &Event, why: &str) -> Error {
    let what = format!(
        "the payload of {} {} version {} cannot be read: {why}",
        event.event_type(),
        event.display_id(),
        event.version(),
    );
    Error::new(Code::InvalidPayloadError, what)
}

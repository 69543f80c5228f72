//! Replay: runs past events again. The selection is a range of the log or one event; the target is a group,
//! a fresh group with given handlers, a function, or copies for all groups.
//!
//! The selection is read in order and in batches. A run with a name keeps a checkpoint and can be resumed.
//! No replay moves the position of a group.

mod copies;
mod corrections;
mod fresh;
mod function;
mod group;
mod pace;
mod preview;
mod report;
mod run;
mod runs;
mod saved;
mod selection;
mod source;
mod target;
mod whole;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::sync::Arc;

use everbus_core::{
    Appended, BoxFuture, Code, Entity, Error, EventId, GroupName, Pattern, Recorded, Result,
    Timestamp, check_checkpoint_name,
};

use crate::audit::audited;
use crate::runtime::bus::{Bus, only_answer};
use crate::runtime::receipt::{About, Receipt};
use crate::runtime::router::Router;

pub use copies::Copies;
pub use fresh::FreshGroup;
pub use function::Function;
pub use group::LiveGroup;
use pace::Stop;
pub use preview::{PreviewedGroup, ReplayPreview};
pub use report::{ReplayFailure, ReplayProgress, ReplayReport, ReplaySkips};
pub use runs::ReplayRun;
use selection::{Named, Selection};
use target::{Context, Target};

/// At most this many error texts are kept by default.
const KEPT_FAILURES: usize = 100;
/// A higher rate than this is refused.
const FASTEST: f64 = 10_000_000.0;
/// A lower rate than this is refused as a mistake.
const SLOWEST: f64 = 0.001;

type Filter = Box<dyn Fn(&Recorded) -> bool + Send + Sync>;
type Progress = Box<dyn FnMut(&ReplayProgress) + Send>;

/// A replay that is being built: which events, how fast, under which name. It runs when it has a target and
/// is awaited; mistakes are reported then.
///
/// By default it selects the whole log at the start of the run, without the system's own events
/// (`system.*`); only a pattern that names those selects them.
///
/// ```
/// use std::sync::Arc;
/// use everbus::{Bus, Recorded};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> everbus::Result<()> {
/// let bus = Bus::open("memory:").await?;
/// bus.publish(("order.placed", 1)).await?;
/// bus.publish(("user.created", 2)).await?;
/// let report = bus
///     .replay()
///     .types("order.*")
///     .filter(|recorded| recorded.event.version() == 1)
///     .into_function(|recorded: Arc<Recorded>| async move {
///         println!("{}", recorded.event.event_type());
///         Ok::<(), String>(())
///     })
///     .await?;
/// assert_eq!((report.processed, report.skipped, report.errors), (1, 0, 0));
/// # Ok(())
/// # }
/// ```
#[must_use = "a replay takes effect when it is given a target and awaited"]
pub struct Replay {
    bus: Bus,
    selection: Selection,
    filter: Option<Filter>,
    progress: Option<Progress>,
    stop: Option<BoxFuture<'static, ()>>,
    name: Option<String>,
    rate: Option<f64>,
    concurrency: usize,
    kept_failures: usize,
    /// The first invalid setting.
    mistake: Option<Error>,
}

impl Bus {
    /// Begins a replay: runs past events again, into a group, into given handlers, into a function, or as
    /// copies for all groups.
    pub fn replay(&self) -> Replay {
        Replay::new(self.clone())
    }

    /// The named replays that are not complete, by name: the running ones, and those that were stopped or
    /// killed and can be resumed.
    pub async fn replays(&self) -> Result<Vec<ReplayRun>> {
        runs::runs(self).await
    }

    /// Deletes the checkpoint of a replay, so that it cannot be resumed. Returns whether there was one.
    /// What the replay did is not undone; remove the fresh group that it left with
    /// [`remove_group`](Self::remove_group). A running replay continues and saves its checkpoint again.
    pub async fn forget_replay(&self, name: impl AsRef<str>) -> Result<bool> {
        runs::forget(self, name.as_ref()).await
    }

    /// Publishes a copy of an event for all groups: under a new id, with the metadata `replay_of` naming
    /// the original; `occurred_at` and everything else are unchanged. `NotFound` if there is no such event.
    /// If several tenants use the id, `InvalidSetting`: name one with
    /// `replay().event(id).tenant(…).publish_copies()`.
    pub async fn replay_event(&self, id: EventId) -> Result<Receipt> {
        replay_event(self, id).await
    }
}

impl Replay {
    pub(crate) fn new(bus: Bus) -> Self {
        Self {
            bus,
            selection: Selection::default(),
            filter: None,
            progress: None,
            stop: None,
            name: None,
            rate: None,
            concurrency: 1,
            kept_failures: KEPT_FAILURES,
            mistake: None,
        }
    }

    fn note<T>(&mut self, said: Result<T>) -> Option<T> {
        match said {
            Ok(value) => Some(value),
            Err(error) => {
                self.mistake.get_or_insert(error);
                None
            }
        }
    }

    /// Only events received at or after this time.
    pub fn since(mut self, at: Timestamp) -> Self {
        self.selection.since = Some(at);
        self
    }

    /// Only events received at or before this time.
    pub fn until(mut self, at: Timestamp) -> Self {
        self.selection.until = Some(at);
        self
    }

    /// Only this event. If several tenants use the id, name the [`tenant`](Self::tenant).
    pub fn event(mut self, id: EventId) -> Self {
        self.selection.event = Some(id);
        self
    }

    /// Only the events of a stream. With declared streams this is the name of one of them; any other name
    /// is [`NoStream`](everbus_core::Code::NoStream).
    ///
    /// Without declared streams, `orders:order-placed` and `orders.order.placed` are the events of one
    /// type, `orders` and `ORDERS` are all events of that domain, and the names of the *omni* table
    /// (`MESSAGES`) are the events that the table routes there.
    pub fn stream(mut self, name: impl AsRef<str>) -> Self {
        let stream = Named::new(self.bus.streams(), name.as_ref());
        self.selection.stream = self.note(stream);
        self
    }

    /// Only events whose type matches: `order.placed`, `order.*`, `order.>`.
    pub fn types(mut self, pattern: impl AsRef<str>) -> Self {
        let pattern = Pattern::new(pattern.as_ref());
        self.selection.types = self.note(pattern);
        self
    }

    /// Only events of this tenant.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.selection.tenant = Some(tenant.into());
        self
    }

    /// Only events of this app.
    pub fn app(mut self, app: impl Into<String>) -> Self {
        self.selection.app = Some(app.into());
        self
    }

    /// Only events about this entity.
    pub fn entity(mut self, kind: impl Into<String>, id: impl Into<String>) -> Self {
        self.selection.entity = Some(Entity {
            kind: kind.into(),
            id: id.into(),
        });
        self
    }

    /// Leaves out events for which the function returns false; the report counts them as skipped. The
    /// checkpoint does not contain the function: give a resumed run the same one.
    pub fn filter(mut self, wanted: impl Fn(&Recorded) -> bool + Send + Sync + 'static) -> Self {
        self.filter = Some(Box::new(wanted));
        self
    }

    /// At most this many events per second, evenly spaced.
    pub fn rate(mut self, per_second: impl Into<f64>) -> Self {
        self.rate = Some(per_second.into());
        self
    }

    /// Names the run. A named run keeps a checkpoint; if it ends early (stopped, cancelled, the process
    /// killed), a run with the same selection, target and name continues from there. Only one run of a name
    /// at a time. A run without a name cannot be resumed.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Calls this function with the progress of the run, after every few events.
    pub fn progress(mut self, told: impl FnMut(&ReplayProgress) + Send + 'static) -> Self {
        self.progress = Some(Box::new(told));
        self
    }

    /// Ends the run early and cleanly when this future ends: current work is finished, the checkpoint
    /// saved, and the report says where the run would [continue](ReplayReport::next).
    pub fn stop_on(mut self, stop: impl Future<Output = ()> + Send + 'static) -> Self {
        self.stop = Some(Box::pin(stop));
        self
    }

    /// How many calls of the function of [`into_function`](Self::into_function) run at once. With 1, which is the default,
    /// events come strictly in order.
    pub fn concurrency(mut self, at_once: usize) -> Self {
        self.concurrency = at_once;
        self
    }

    /// Keeps at most this many error texts in the report; 100 by default. All errors are counted.
    pub fn keep_failures(mut self, most: usize) -> Self {
        self.kept_failures = most;
        self
    }

    /// Redelivers the events to a group, beside its normal work. The group gets them with fresh attempts, without a
    /// staleness limit, and retries and dead-letters them as usual. These are left out and counted as skipped: events
    /// that its patterns do not match, events that are still pending in the group, events that were corrected for this
    /// group, and corrections for another group. The run ends when all events wait for the group; idempotent handlers
    /// skip events that their inbox knows.
    pub fn into_group(self, group: impl AsRef<str>) -> Run<LiveGroup> {
        let group = group.as_ref().parse::<GroupName>();
        self.given(|replay| replay.note(group).map(LiveGroup::new))
    }

    /// Runs the given handlers on the events, in a group that exists only for this run: no live event
    /// reaches them, and other groups are not affected. They go through the pipeline of the bus, with its
    /// retries and dead letters, whether or not the bus is started. The run ends when everything is
    /// settled. Then the group is removed; if there are dead letters, it is kept and the report [names
    /// it](ReplayReport::kept_group).
    ///
    /// Events that handlers return are published, and their side effects are real. If the process ends
    /// before the run, the group stays in the engine until a named run is resumed, or until it is removed.
    pub fn into_fresh_group(self, router: Router) -> Run<FreshGroup> {
        self.given(|_| Some(FreshGroup::new(router)))
    }

    /// Calls a function with each event, in order. An error or a panic is counted and does not stop the
    /// run.
    pub fn into_function<F, Fut, E>(self, function: F) -> Run<Function<F>>
    where
        F: Fn(Arc<Recorded>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        self.given(|replay| Some(Function::new(function, replay.concurrency)))
    }

    /// Publishes copies for all groups: under new ids, linked to their originals by the metadata
    /// `replay_of`; `occurred_at` and everything else are unchanged. A resumed run publishes nothing twice.
    /// Events that are copies themselves are skipped: otherwise a second replay of a range would double it.
    /// Corrections of dead letters, which are for one group, and the events they correct are skipped too.
    /// An event that is [named](Self::event) is always copied.
    pub fn publish_copies(self) -> Run<Copies> {
        self.given(|_| Some(Copies::default()))
    }

    fn given<T>(mut self, target: impl FnOnce(&mut Self) -> Option<T>) -> Run<T> {
        let target = target(&mut self);
        Run {
            replay: self,
            target,
        }
    }

    /// The context of the target.
    fn context(&mut self) -> Context {
        Context {
            bus: self.bus.clone(),
            stop: Stop::on(self.stop.take()),
            name: self.name.clone(),
            kept_failures: self.kept_failures,
            single: self.selection.event.is_some(),
        }
    }

    /// Whether all settings are valid.
    fn check(&mut self) -> Result<()> {
        if let Some(mistake) = self.mistake.take() {
            return Err(mistake);
        }
        self.selection.check()?;
        if let Some(rate) = self.rate
            && !(SLOWEST..=FASTEST).contains(&rate)
        {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("a rate of {rate} is out of range"),
            )
            .hint(format!("between {SLOWEST} and {FASTEST} events per second")));
        }
        if self.concurrency == 0 || self.concurrency > 10_000 {
            return Err(
                Error::new(Code::InvalidSetting, "the concurrency is out of range")
                    .hint("between 1 and 10000 calls at once"),
            );
        }
        if let Some(name) = &self.name {
            check_checkpoint_name(name)?;
            // The name is also part of a group name, after a prefix.
            if name.chars().count() > 100 {
                return Err(Error::new(
                    Code::InvalidSetting,
                    format!("the name {name:?} of the run is too long"),
                )
                .hint("at most 100 characters"));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay")
            .field("selection", &self.selection)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A replay with its target. Awaiting it runs it; [`preview`](Self::preview) says what it would do.
/// Dropping the future ends the run where it is. If the run has a name, its checkpoint is at most a second
/// old, and the work since then is repeated when the run is resumed (copies are not published twice);
/// [`stop_on`](Replay::stop_on) ends it cleanly.
#[must_use = "a replay takes effect when it is awaited"]
pub struct Run<T> {
    replay: Replay,
    /// `None` if a setting is invalid; the replay has the mistake.
    target: Option<T>,
}

impl<T: Target> Run<T> {
    fn checked(mut self) -> Result<(Replay, T)> {
        self.replay.check()?;
        let unsaid = || Error::new(Code::Internal, "a replay without a target");
        Ok((self.replay, self.target.ok_or_else(unsaid)?))
    }

    /// What a run would do: how many events, of which types, which groups and handlers would get them, and
    /// how many the inbox would skip. Reads the selection once and changes nothing.
    pub async fn preview(self) -> Result<ReplayPreview> {
        let (replay, target) = self.checked()?;
        preview::preview(replay, target).await
    }
}

impl<T: Target> IntoFuture for Run<T> {
    type Output = Result<ReplayReport>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (replay, target) = self.checked()?;
            run::run(replay, target).await
        })
    }
}

impl<T> fmt::Debug for Run<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.replay.fmt(f)
    }
}

/// Publishes a copy of one event.
async fn replay_event(bus: &Bus, id: EventId) -> Result<Receipt> {
    bus.accepts()?;
    let selection = Selection {
        event: Some(id),
        ..Selection::default()
    };
    let shared = bus.shared();
    let original = source::only(&shared.engine, &selection, id).await?;
    let original = whole::whole(shared, &original).await??;
    let copy = copies::copy_of(&original.event, EventId::new())?;
    let about = About::of(&copy);
    let published = async {
        let appended = only_answer(bus.append_as_is(vec![copy]).await?)?;
        Ok(Published {
            copy: appended.id,
            appended,
        })
    };
    let action = run::action(&selection, "copies", None);
    let operator = shared.audit().operator();
    let published = audited(&shared.engine, &operator, action, published).await?;
    Ok(Receipt::new(published.appended, about, shared.clone()))
}

/// The audit record of a copy.
#[derive(serde::Serialize)]
struct Published {
    copy: EventId,
    #[serde(skip)]
    appended: Appended,
}

//! Which handlers there are, in which groups, and whether their settings agree.

use std::collections::BTreeMap;
use std::sync::Arc;

use everbus_core::{
    BoxFuture, Code, Error, GroupName, GroupSpec, Result, StartFrom, SubscriptionSpec,
};
use tokio::task::JoinHandle;

use crate::bus::Shared;
use crate::dispatch::{Plan, Runner};
use crate::handler::{Handler, HandlerResult};
use crate::message::Message;
use crate::options::DEFAULT_CONCURRENCY;
use crate::subscribe::{Request, SubscriptionId};

/// The groups this bus has handlers in. Guarded by one lock: subscribing is rare.
#[derive(Default)]
pub(crate) struct Registry {
    groups: BTreeMap<GroupName, Group>,
    started: bool,
    housekeeping: Vec<JoinHandle<()>>,
}

/// A group as its subscriptions in this bus agree it to be.
struct Group {
    start_from: StartFrom,
    ordered: bool,
    /// The subscription that settled where the group begins and whether it is ordered.
    founder: String,
    /// The number asked for, and who asked.
    concurrency: Option<(usize, String)>,
    /// In the order they were subscribed, which is the order they run in.
    handlers: Vec<Arc<Handler>>,
    runner: Option<Arc<Runner>>,
}

impl Registry {
    pub(crate) async fn subscribe(
        &mut self,
        shared: &Arc<Shared>,
        request: Request,
        run: Box<dyn Fn(Message) -> BoxFuture<'static, HandlerResult> + Send + Sync>,
    ) -> Result<SubscriptionId> {
        let existing = self
            .groups
            .get(&request.group)
            .filter(|group| !group.handlers.is_empty());
        let name = choose_name(existing, &request)?;
        let (start_from, ordered) = match existing {
            Some(group) => {
                group.agrees(&request, &name)?;
                (group.start_from, group.ordered)
            }
            None => (
                request.start_from.unwrap_or(if request.group.is_unnamed() {
                    StartFrom::First
                } else {
                    StartFrom::New
                }),
                request.ordered,
            ),
        };
        let declared = shared
            .engine
            .broker
            .declare(GroupSpec {
                name: request.group.clone(),
                start_from,
                ordered,
                subscriptions: vec![SubscriptionSpec {
                    name: name.clone(),
                    pattern: request.pattern.clone(),
                }],
            })
            .await?;
        let Some(info) = declared.into_iter().find(|info| info.name == name) else {
            return Err(Error::new(
                Code::Internal,
                format!("the engine did not confirm the subscription {name:?}"),
            ));
        };
        let id = SubscriptionId::from(info.id);
        let group = self
            .groups
            .entry(request.group.clone())
            .or_insert_with(|| Group {
                start_from,
                ordered,
                founder: name.clone(),
                concurrency: None,
                handlers: Vec::new(),
                runner: None,
            });
        if group.handlers.is_empty() {
            (group.start_from, group.ordered) = (start_from, ordered);
            (group.founder, group.concurrency) = (name.clone(), None);
        }
        if let Some(asked) = request.concurrency {
            group.concurrency.get_or_insert((asked, name.clone()));
        }
        group.handlers.push(Arc::new(Handler::new(
            id,
            name,
            request.pattern,
            request.retry,
            request.timeout,
            run,
        )));
        if self.started {
            group.run(shared, &request.group);
        }
        Ok(id)
    }

    pub(crate) async fn unsubscribe(
        &mut self,
        shared: &Arc<Shared>,
        id: SubscriptionId,
    ) -> Result<()> {
        let found = self.groups.iter_mut().find_map(|(name, group)| {
            let index = group.handlers.iter().position(|h| h.id == id)?;
            Some((name, group, index))
        });
        let Some((name, group, index)) = found else {
            return Err(Error::new(
                Code::SubscriptionNotFound,
                format!("this bus has no subscription {id}"),
            )
            .hint("unsubscribe takes the id that subscribe returned, once"));
        };
        match shared.engine.broker.retract(id.into()).await {
            // Another process was first; the handler goes all the same.
            Err(error) if error.code() == Code::SubscriptionNotFound => {}
            retracted => retracted?,
        }
        group.handlers.remove(index).remove();
        if self.started {
            group.run(shared, name);
        }
        Ok(())
    }

    /// Starts every group; whether this was the first time.
    pub(crate) fn start(&mut self, shared: &Arc<Shared>) -> bool {
        if std::mem::replace(&mut self.started, true) {
            return false;
        }
        for (name, group) in &mut self.groups {
            group.run(shared, name);
        }
        true
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started
    }

    /// Keeps a background task that ends with the bus.
    pub(crate) fn keep(&mut self, task: JoinHandle<()>) {
        self.housekeeping.push(task);
    }

    pub(crate) fn stop_housekeeping(&mut self) {
        self.housekeeping.drain(..).for_each(|task| task.abort());
    }

    pub(crate) fn take_runners(&mut self) -> Vec<Arc<Runner>> {
        self.groups
            .values_mut()
            .filter_map(|group| group.runner.take())
            .collect()
    }

    /// Refuses if the group has handlers here; otherwise nothing is remembered of it.
    pub(crate) fn forget_group(&mut self, name: &GroupName) -> Result<()> {
        match self.groups.get(name) {
            Some(group) if !group.handlers.is_empty() => Err(Error::new(
                Code::GroupConflict,
                format!("the group {name} still has handlers in this bus"),
            )
            .hint("unsubscribe them first")),
            _ => {
                if let Some(runner) = self.groups.remove(name).and_then(|group| group.runner) {
                    runner.retire();
                }
                Ok(())
            }
        }
    }
}

impl Group {
    /// Whether a further subscription may join.
    fn agrees(&self, request: &Request, name: &str) -> Result<()> {
        let conflict = |what: String| {
            Err(Error::new(
                Code::GroupConflict,
                format!("in the group {}, {what}", request.group),
            )
            .hint("say it the same way in both subscriptions, or in the first one only"))
        };
        if let Some(from) = request.start_from
            && from != self.start_from
        {
            return conflict(format!(
                "{:?} starts from {:?} and {name:?} from {from:?}",
                self.founder, self.start_from
            ));
        }
        if request.ordered && !self.ordered {
            return conflict(format!("{:?} is not ordered and {name:?} is", self.founder));
        }
        if let (Some(asked), Some((agreed, by))) = (request.concurrency, &self.concurrency)
            && asked != *agreed
        {
            return conflict(format!(
                "{by:?} asks for a concurrency of {agreed} and {name:?} for {asked}"
            ));
        }
        Ok(())
    }

    /// Tells the runner what to do now, and starts one if there is none.
    fn run(&mut self, shared: &Arc<Shared>, name: &GroupName) {
        let concurrency = self
            .concurrency
            .as_ref()
            .map_or(DEFAULT_CONCURRENCY, |(agreed, _)| *agreed);
        let plan = Plan::new(&self.handlers, concurrency, &shared.options);
        if let Some(stopped) = self.runner.take_if(|runner| runner.has_stopped()) {
            stopped.retire();
        }
        match &self.runner {
            Some(runner) => runner.change(plan),
            None if self.handlers.is_empty() => shared.group_not_stopped(name),
            None => self.runner = Some(Runner::start(shared.clone(), name.clone(), plan)),
        }
    }
}

/// The name asked for, or the pattern with a number if the group has it already.
fn choose_name(group: Option<&Group>, request: &Request) -> Result<String> {
    let taken =
        |name: &str| group.is_some_and(|group| group.handlers.iter().any(|h| h.name == name));
    match &request.name {
        Some(name) if taken(name) => Err(Error::new(
            Code::GroupConflict,
            format!(
                "the group {} already has a subscription named {name:?}",
                request.group
            ),
        )
        .hint("names are unique in a group; leave the name out to have one chosen")),
        Some(name) => Ok(name.clone()),
        None => {
            let pattern = request.pattern.as_str();
            let mut name = pattern.to_owned();
            let mut number = 2;
            while taken(&name) {
                name = format!("{pattern}#{number}");
                number += 1;
            }
            Ok(name)
        }
    }
}

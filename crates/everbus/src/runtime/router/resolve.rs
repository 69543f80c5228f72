//! Resolves a router: merges the settings of nested routers, and checks the router before the bus is changed.

use std::collections::BTreeSet;
use std::sync::Arc;

use everbus_core::{Code, Error, GroupName, Pattern, Result, StartFrom, suggest};

use super::{Declared, Entry, Route, Router};
use crate::handler::extract::{Needs, States};
use crate::handler::outcome::Returns;
use crate::handler::upcast::Upcasts;
use crate::runtime::options::{check_concurrency, check_duration, check_staleness};
use crate::runtime::subscription::settings::Settings;

/// A resolved router.
pub(crate) struct Resolved {
    pub(crate) subscriptions: Vec<Subscription>,
    pub(crate) declared: Vec<Declared>,
    /// The groups that must have no other subscriptions than these (`Router::exactly`).
    pub(crate) exact: BTreeSet<GroupName>,
}

/// One subscription to make.
pub(crate) struct Subscription {
    pub(crate) group: GroupName,
    pub(crate) pattern: Pattern,
    pub(crate) settings: Settings,
    pub(crate) states: Arc<States>,
    pub(crate) upcasts: Arc<Upcasts>,
    pub(crate) route: Route,
}

impl Resolved {
    pub(super) fn of(router: Router) -> Result<Self> {
        let mut resolved = Self {
            subscriptions: Vec::new(),
            declared: Vec::new(),
            exact: BTreeSet::new(),
        };
        let (states, mut upcasts) = (States::default(), Upcasts::default());
        gather_upcasts(&router, &mut upcasts);
        upcasts.check()?;
        resolved.add(
            router,
            "",
            &Settings::default(),
            &states,
            &Arc::new(upcasts),
        )?;
        Ok(resolved)
    }

    fn add(
        &mut self,
        router: Router,
        prefix: &str,
        outer: &Settings,
        outer_states: &States,
        upcasts: &Arc<Upcasts>,
    ) -> Result<()> {
        let Router {
            entries,
            settings,
            mut states,
            upcasts: _,
            schemas,
            exact,
        } = router;
        let first = self.subscriptions.len();
        let settings = settings.over(outer);
        states.adopt(outer_states);
        let states = Arc::new(states);
        self.declared.extend(schemas);
        for entry in entries {
            match entry {
                Entry::Nested(inner, router) => {
                    let prefix = joined(prefix, &inner);
                    self.add(router, &prefix, &settings, &states, upcasts)?;
                }
                Entry::Route(pattern, route) => {
                    let pattern = Pattern::new(&joined(prefix, &pattern))?;
                    let settings = route.settings.clone().over(&settings);
                    self.subscriptions.push(Subscription {
                        group: check(&settings)?,
                        pattern,
                        settings,
                        states: states.clone(),
                        upcasts: upcasts.clone(),
                        route,
                    });
                }
            }
        }
        if exact {
            let own = self.subscriptions[first..].iter();
            self.exact.extend(own.map(|s| s.group.clone()));
        }
        Ok(())
    }

    /// Every event type that is known by its exact name.
    pub(crate) fn known_types(&self) -> BTreeSet<String> {
        let mut known: BTreeSet<String> = self
            .declared
            .iter()
            .map(|declared| declared.event_type.clone())
            .collect();
        for Subscription { route, .. } in &self.subscriptions {
            let Needs { payloads, .. } = &route.needs;
            let Returns { emits, .. } = &route.returns;
            known.extend(payloads.iter().map(|need| need.event_type.to_owned()));
            known.extend(emits.iter().map(|emitted| emitted.event_type.to_owned()));
        }
        known
    }

    /// The patterns that match none of the known types, each with the nearest known type.
    pub(crate) fn unmatched(&self, known: &BTreeSet<String>) -> Vec<(String, Option<String>)> {
        if known.is_empty() {
            return Vec::new();
        }
        let lonely = self
            .subscriptions
            .iter()
            .filter(|subscription| !known.iter().any(|name| subscription.pattern.matches(name)));
        lonely
            .map(|subscription| {
                let pattern = subscription.pattern.as_str().to_owned();
                let near = suggest::nearest(&pattern, known.iter().map(String::as_str));
                (pattern, near.map(str::to_owned))
            })
            .collect()
    }
}

/// Collects all version conversions, from all nested routers: they apply to the event type everywhere.
fn gather_upcasts(router: &Router, all: &mut Upcasts) {
    all.merge(&router.upcasts);
    for entry in &router.entries {
        if let Entry::Nested(_, inner) = entry {
            gather_upcasts(inner, all);
        }
    }
}

fn joined(prefix: &str, rest: &str) -> String {
    match (prefix, rest) {
        ("", rest) => rest.to_owned(),
        (prefix, "") => prefix.to_owned(),
        (prefix, rest) => format!("{prefix}.{rest}"),
    }
}

/// Checks that the settings are consistent. Returns the group they name.
fn check(settings: &Settings) -> Result<GroupName> {
    let group = match &settings.group {
        Some(name) => GroupName::new(name)?,
        None if settings.ephemeral == Some(true) => {
            // The last 48 bits of a version 4 UUID are random.
            let id = uuid::Uuid::new_v4().simple().to_string();
            GroupName::new(&format!("ephemeral-{}", &id[20..]))?
        }
        None => GroupName::unnamed(),
    };
    let not_first = |from: &StartFrom| *from != StartFrom::First;
    if group.is_unnamed() && settings.start_from.as_ref().is_some_and(not_first) {
        return Err(Error::new(
            Code::InvalidSetting,
            "the unnamed group always begins at the first event",
        )
        .hint("give the subscription a group to start it elsewhere"));
    }
    if let Some(timeout) = settings.timeout {
        check_duration("the timeout", timeout)?;
    }
    if let Some(concurrency) = settings.concurrency {
        check_concurrency(concurrency)?;
    }
    if let Some(lease) = settings.lease {
        check_duration("the lease", lease)?;
    }
    if settings.prefetch == Some(0) {
        return Err(Error::new(Code::InvalidSetting, "a prefetch of 0 events")
            .hint("at least 1; the concurrency is a good number for long work"));
    }
    if let Some(age) = settings.max_staleness {
        check_staleness(age)?;
    }
    if let Some(policy) = settings.breaker_policy() {
        policy.validate()?;
    }
    if let Some(name) = &settings.name {
        check_name("a subscription", name)?;
    }
    if let Some(name) = &settings.dependency {
        check_name("a dependency", name)?;
    }
    Ok(group)
}

fn check_name(of: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.chars().count() > 255 || name.chars().any(char::is_control) {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{name:?} is not a name for {of}"),
        )
        .hint("a name is 1 to 255 printable characters"));
    }
    Ok(())
}

impl Subscription {
    /// Checks that every argument of the handler can be provided, and that the handler can read the events of
    /// its pattern.
    pub(crate) fn check_wiring(&self, name: &str) -> Result<()> {
        for need in &self.route.needs.states {
            if !self.states.has(need.id) {
                return Err(Error::new(
                    Code::InvalidSetting,
                    format!(
                        "the handler {name:?} takes a State<{}> that its router does not have",
                        need.rust_type
                    ),
                )
                .hint("add it with Router::with_state"));
            }
        }
        let required = || {
            self.route
                .needs
                .payloads
                .iter()
                .filter(|need| !need.optional)
        };
        for need in required() {
            if !self.pattern.matches(need.event_type) {
                return Err(Error::new(
                    Code::InvalidSetting,
                    format!(
                        "the handler {name:?} takes a Payload<{}>, which is {:?}, and that never \
                         matches its pattern",
                        need.rust_type, need.event_type
                    ),
                )
                .hint(format!("subscribe it to {:?}", need.event_type)));
            }
        }
        let types: BTreeSet<_> = required().map(|need| need.event_type).collect();
        if types.len() > 1 {
            return Err(Error::new(
                Code::InvalidSetting,
                format!("the handler {name:?} takes payloads of several event types at once"),
            )
            .hint("take them as Option<Payload<…>>: the one that came is there"));
        }
        Ok(())
    }
}

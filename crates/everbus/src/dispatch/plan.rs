//! What a group is to do at the moment, and which handlers a type goes to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use everbus_core::{ConsumeOptions, Pattern};

use crate::handler::Handler;
use crate::options::BusOptions;

/// A lease outlives the longest handler by this much.
const LEASE_MARGIN: Duration = Duration::from_secs(10);
/// A log with more types than this is matched anew now and then, so that the table stays small.
const MOST_ROUTES: usize = 10_000;

/// The handlers of a group and how they are fed.
pub(crate) struct Plan {
    pub(super) handlers: Vec<Arc<Handler>>,
    pub(super) concurrency: usize,
    pub(super) prefetch: usize,
    pub(super) lease: Duration,
    no_handler_after: Duration,
}

impl Plan {
    pub(crate) fn new(handlers: &[Arc<Handler>], concurrency: usize, options: &BusOptions) -> Self {
        let longest = handlers.iter().map(|handler| handler.timeout).max();
        Self {
            handlers: handlers.to_vec(),
            concurrency,
            prefetch: options.prefetch_for(concurrency),
            lease: longest.unwrap_or(options.timeout) + LEASE_MARGIN,
            no_handler_after: options.no_handler_after,
        }
    }

    pub(super) fn patterns(&self) -> Vec<Pattern> {
        self.handlers.iter().map(|h| h.pattern.clone()).collect()
    }

    pub(super) fn consume_options(&self) -> ConsumeOptions {
        ConsumeOptions {
            prefetch: self.prefetch,
            lease: self.lease,
            handled: self.patterns(),
            no_handler_after: self.no_handler_after,
        }
    }

    /// Whether a consumer opened for the other plan only needs to be told its patterns.
    pub(super) fn consumes_like(&self, other: &Plan) -> bool {
        self.prefetch == other.prefetch && self.lease == other.lease
    }
}

/// The handlers that match a type, in subscription order.
pub(super) type Route = Arc<[Arc<Handler>]>;

/// Remembers the handlers of each type, so that a pattern is matched once per type.
pub(super) struct Routes {
    plan: Arc<Plan>,
    by_type: HashMap<Arc<str>, Route>,
    last: Option<(Arc<str>, Route)>,
}

impl Routes {
    pub(super) fn new(plan: Arc<Plan>) -> Self {
        Self {
            plan,
            by_type: HashMap::new(),
            last: None,
        }
    }

    /// Forgets everything if the plan is another one.
    pub(super) fn follow(&mut self, plan: Arc<Plan>) {
        if !Arc::ptr_eq(&self.plan, &plan) {
            *self = Self::new(plan);
        }
    }

    pub(super) fn find(&mut self, event_type: &Arc<str>) -> Route {
        // Events of one type often come in a row.
        if let Some((last, route)) = &self.last
            && (Arc::ptr_eq(last, event_type) || last == event_type)
        {
            return route.clone();
        }
        let route = match self.by_type.get(event_type) {
            Some(route) => route.clone(),
            None => {
                let matching = self.plan.handlers.iter();
                let route: Route = matching
                    .filter(|handler| handler.pattern.matches(event_type))
                    .cloned()
                    .collect();
                if self.by_type.len() >= MOST_ROUTES {
                    self.by_type.clear();
                }
                self.by_type.insert(event_type.clone(), route.clone());
                route
            }
        };
        self.last = Some((event_type.clone(), route.clone()));
        route
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_types_stays_bounded() {
        let plan = Arc::new(Plan::new(&[], 1, &BusOptions::default()));
        let mut routes = Routes::new(plan);
        for n in 0..3 * MOST_ROUTES {
            routes.find(&format!("type.{n}").into());
            assert!(routes.by_type.len() <= MOST_ROUTES);
        }
    }
}

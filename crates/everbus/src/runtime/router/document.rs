//! The AsyncAPI document of a router.

use std::collections::{BTreeMap, BTreeSet};

use everbus_core::{Result, RetryPolicy};
use serde_json::{Value, json};

use super::{Resolved, Router, Subscription};
use crate::asyncapi::{Action, Channel, Document, Operation};

impl Router {
    /// Builds an AsyncAPI 3 document of everything that the router's handlers receive and send: channels,
    /// messages with their schemas, and operations.
    ///
    /// ```
    /// use everbus::{Event, Payload, Router};
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Serialize, Deserialize, Event)]
    /// #[event(type = "orders.order.placed", version = 2)]
    /// struct OrderPlaced { order: u64 }
    ///
    /// async fn confirm(Payload(_): Payload<OrderPlaced>) {}
    ///
    /// let router = Router::new().group("mail").on("orders.order.placed", confirm);
    /// let document = router.asyncapi("Shop", "1.0.0")?;
    /// assert_eq!(document["channels"]["orders.order.placed"]["address"], "orders.order.placed");
    /// # Ok::<(), everbus::Error>(())
    /// ```
    pub fn asyncapi(&self, title: &str, version: &str) -> Result<Value> {
        let resolved = self.clone().resolve()?;
        Document {
            channels: channels(&resolved),
            operations: resolved.subscriptions.iter().flat_map(operations).collect(),
            ..Document::new(title, version)
        }
        .to_json()
    }
}

/// A channel for each declared event, and for each payload that a handler receives or sends. An event type
/// may occur several times.
fn channels(resolved: &Resolved) -> Vec<Channel> {
    let declared = resolved
        .declared
        .iter()
        .map(|d| (d.event_type.as_str(), d.version, d.schema.clone()));
    let of_handlers = resolved.subscriptions.iter().flat_map(|subscription| {
        let route = &subscription.route;
        let taken = route.needs.payloads.iter();
        let sent = route.returns.emits.iter();
        taken
            .map(|p| (p.event_type, p.version, p.schema.clone()))
            .chain(sent.map(|e| (e.event_type, e.version, e.schema.clone())))
    });
    declared
        .chain(of_handlers)
        .map(|(event_type, version, schema)| Channel {
            event_type: event_type.to_owned(),
            versions: vec![(version, schema)],
        })
        .collect()
}

/// The operations of one handler: one for what it receives, and one for each event type that it sends.
fn operations(subscription: &Subscription) -> Vec<Operation> {
    let settings = &subscription.settings;
    let pattern = subscription.pattern.as_str();
    let name = settings.name.clone().unwrap_or_else(|| pattern.to_owned());
    // The generated name of an ephemeral group tells the reader nothing.
    let named = settings.group.is_some() && !subscription.group.is_unnamed();
    let group = named.then(|| subscription.group.to_string());
    let payloads = &subscription.route.needs.payloads;
    let versions: BTreeSet<u32> = payloads
        .iter()
        .filter(|need| need.event_type == pattern)
        .flat_map(|need| {
            let upcasts = &subscription.upcasts;
            upcasts.versions_read_as(need.event_type, need.version)
        })
        .collect();
    let received = Operation {
        group: group.clone(),
        versions: versions.into_iter().collect(),
        retry: (!settings.retry.is_empty()).then(|| settings.retry_policy(RetryPolicy::default())),
        timeout: settings.timeout,
        settings: documented_settings(subscription),
        ..Operation::new(Action::Receive, name.as_str(), pattern)
    };
    let sent = subscription
        .route
        .returns
        .emits
        .iter()
        .map(|emitted| Operation {
            group: group.clone(),
            versions: vec![emitted.version],
            ..Operation::new(Action::Send, name.as_str(), emitted.event_type)
        });
    std::iter::once(received).chain(sent).collect()
}

/// The settings of a handler that the document shows: those that were given, without defaults.
fn documented_settings(subscription: &Subscription) -> BTreeMap<String, Value> {
    let settings = &subscription.settings;
    let exactly_once = subscription.route.returns.transaction.is_some();
    let given = [
        ("ordered", settings.ordered.map(Value::from)),
        ("concurrency", settings.concurrency.map(Value::from)),
        ("idempotent", settings.idempotent.map(Value::from)),
        ("exactly-once", exactly_once.then(|| Value::from(true))),
        ("dependency", settings.dependency.clone().map(Value::from)),
        (
            "criticality",
            settings.criticality.map(|c| json!(c.as_str())),
        ),
        (
            "max-staleness-ms",
            settings
                .max_staleness
                .map(|age| Value::from(u64::try_from(age.as_millis()).unwrap_or(u64::MAX))),
        ),
    ];
    let given = given.into_iter();
    given
        .filter_map(|(key, value)| Some((key.to_owned(), value?)))
        .collect()
}

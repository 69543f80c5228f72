//! Makes a registered handler of a route: its settings are merged with those of the bus and of the
//! configuration file, its breaker is found, its function is wrapped in its layers.

use std::sync::Arc;

use everbus_core::{Code, Error, GroupName, Pattern, Result};

use crate::breaker::{Breaker, BreakerPolicy, Criticality};
use crate::handler::{Registered, Traits};
use crate::runtime::bus::Shared;
use crate::runtime::circuits::Owner;
use crate::runtime::options::{ConsumerOverride, check_duration};
use crate::runtime::router::Subscription;
use crate::runtime::subscription::agreed::{Agreed, Asked};
use crate::runtime::subscription::settings::Settings;
use crate::schema::Schema;

/// Prepares a subscription: resolves its settings, and adds them to what its group has agreed on.
pub(crate) fn prepare(
    shared: &Arc<Shared>,
    subscription: Subscription,
    agreed: &mut Agreed,
) -> Result<Registered> {
    let options = &shared.options;
    let pattern = subscription.pattern.clone();
    let group = subscription.group.clone();
    // The file overrides the code, so that a deployment can be tuned without a change of the program.
    let mut settings = subscription.settings.clone();
    for consumer in &options.consumers {
        if consumer.concerns(&group, &pattern) {
            settings = consumer.settings.clone().over(&settings);
            // A consumer of the file has a breaker unless a setting disables it.
            settings
                .breaker
                .get_or_insert(Some(BreakerPolicy::default()));
        }
    }
    let name = agreed.join(&Asked {
        group: &group,
        name: settings.name.as_deref(),
        pattern: pattern.as_str(),
        start_from: settings.start_from,
        ordered: settings.ordered,
        ephemeral: settings.ephemeral,
        concurrency: settings.concurrency,
    })?;
    subscription.check_wiring(&name)?;
    let retry = settings.retry_policy(options.retry);
    retry.validate()?;
    let timeout = settings.timeout.unwrap_or(options.timeout);
    check_duration("the timeout", timeout)?;
    let transaction = subscription.route.returns.transaction;
    check_engine(shared, &name, &settings, transaction)?;
    let schema = match &settings.schema {
        Some(json) => Some(Arc::new(Schema::new(name.as_str(), json)?)),
        None => None,
    };
    let criticality = settings.criticality.unwrap_or_default();
    if settings.drop_failed == Some(true) && criticality != Criticality::BestEffort {
        let what = format!("{name} drops what fails and is {criticality}");
        return Err(Error::new(Code::InvalidSetting, what)
            .hint("only best-effort handlers may: .criticality(Criticality::BestEffort)"));
    }
    let traits = Traits {
        states: subscription.states,
        upcasts: subscription.upcasts,
        schema,
        max_staleness: settings.max_staleness,
        breaker: breaker(shared, &group, &settings)?,
        criticality: settings.criticality.unwrap_or_default(),
        decode: settings.decode.unwrap_or_default(),
        drop_failed: settings.drop_failed.unwrap_or(false),
        idempotent: transaction.is_some() || settings.idempotent.unwrap_or(false),
        prefetch: settings.prefetch,
        lease: settings.lease,
        audit: Some(shared.audit()),
    };
    let layers = settings.layers.iter().rev();
    let run = layers.fold(subscription.route.run, |run, layer| layer.wrap(run));
    let mut handler = Registered::new(name, pattern, run);
    handler.group = group;
    handler.retry = retry;
    handler.timeout = timeout;
    handler.traits = traits;
    Ok(handler)
}

impl ConsumerOverride {
    /// Whether this entry of the file is about a subscription with this group and pattern.
    pub(crate) fn concerns(&self, group: &GroupName, pattern: &Pattern) -> bool {
        // The file names the pattern itself, a type that the pattern covers, or a declared stream that the
        // pattern reads from.
        self.group == *group
            && (*pattern == self.pattern
                || pattern.matches(self.pattern.as_str())
                || (self.whole_stream && pattern.overlap(&self.pattern).is_some()))
    }
}

/// Checks that the engine supports what the handler relies on.
fn check_engine(
    shared: &Shared,
    name: &str,
    settings: &Settings,
    transaction: Option<&'static str>,
) -> Result<()> {
    let capabilities = shared.engine.broker.capabilities();
    if let Some(wanted) = transaction
        && capabilities.transaction != transaction
    {
        return Err(Error::new(
            Code::Unsupported,
            format!(
                "the handler {name:?} works in a transaction of the {wanted} engine, and this is the \
                 {} engine",
                capabilities.engine
            ),
        )
        .hint("open the bus on that engine, or make the handler idempotent instead"));
    }
    let forgets = settings.ephemeral == Some(true);
    if !forgets {
        let hint =
            "put a store beside the broker, with `Bus::builder().store(…)`; it keeps what failed";
        let letters = shared.engine.dead_letters();
        letters.map_err(|error| error.hint(hint)).map(drop)?;
    }
    if transaction.is_some() || settings.idempotent == Some(true) {
        let hint = "put a store beside the broker, with `Bus::builder().store(…)`; its inbox \
                    remembers what was handled";
        shared.engine.inbox().map_err(|error| error.hint(hint))?;
    }
    Ok(())
}

fn breaker(shared: &Shared, group: &GroupName, settings: &Settings) -> Result<Option<Breaker>> {
    let Some(policy) = settings.breaker_policy() else {
        return Ok(None);
    };
    policy.validate()?;
    let owner = match &settings.dependency {
        Some(name) => Owner::Dependency(name.clone()),
        None => Owner::Group(group.clone()),
    };
    let clock = &shared.options.clock;
    let criticality = settings.criticality.unwrap_or_default();
    let circuits = &shared.circuits;
    circuits.get(&owner, policy, criticality, clock).map(Some)
}

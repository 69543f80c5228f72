//! Holds: events that retention must keep although they are old, because a program above the bus still needs them.
//!
//! A hold names event types and a time. Every run of retention, in whichever process, keeps the events of these types
//! that were received since then. Holds are values in the store; a store without values by key has none.

use everbus_core::{Code, Engine, Error, Pattern, Result, Retention, StreamAge, Timestamp};
use serde::{Deserialize, Serialize};

use crate::kv::Kv;

/// The bucket of the holds.
const BUCKET: &str = "everbus-holds";
/// The key of the list of their names: a bucket cannot be listed on every engine.
const NAMES: &str = "names";

/// Events of these types that were received since a time stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The event types.
    pub types: Vec<String>,
    /// Events received at or after this time stay.
    pub since: Timestamp,
}

/// The hold of a name, with its revision.
pub async fn get(engine: &Engine, name: &str) -> Result<Option<(Hold, u64)>> {
    bucket(engine)?.get_json(name).await
}

/// Puts a hold, if it has this revision or (0) is not there yet. `RevisionConflict` if another process changed it.
pub async fn put(engine: &Engine, name: &str, hold: &Hold, expected: u64) -> Result<()> {
    let bucket = bucket(engine)?;
    // The name first: a hold that is not listed would not be found.
    loop {
        let (mut names, revision): (Vec<String>, u64) =
            bucket.get_json(NAMES).await?.unwrap_or_default();
        if names.iter().any(|known| known == name) {
            break;
        }
        names.push(name.to_owned());
        match bucket.put_json(NAMES, &names).expected(revision).await {
            Ok(_) => break,
            Err(error) if error.code() == Code::RevisionConflict => {}
            Err(error) => return Err(error),
        }
    }
    bucket
        .put_json(name, hold)
        .expected(expected)
        .await
        .map(drop)
}

/// The retention with all holds of the store applied. It keeps at least as much as the given retention.
pub async fn applied(engine: &Engine, retention: Retention, now: Timestamp) -> Result<Retention> {
    let bucket = match bucket(engine) {
        Ok(bucket) => bucket,
        Err(error) if error.code() == Code::Unsupported => return Ok(retention),
        Err(error) => return Err(error),
    };
    let names: Option<(Vec<String>, u64)> = bucket.get_json(NAMES).await?;
    let mut holds = Vec::new();
    for name in names.unwrap_or_default().0 {
        holds.extend(bucket.get_json::<Hold>(name).await?.map(|(hold, _)| hold));
    }
    with(retention, &holds, now)
}

fn with(mut retention: Retention, holds: &[Hold], now: Timestamp) -> Result<Retention> {
    let mut ages = Vec::new();
    for hold in holds {
        for event_type in &hold.types {
            let age = retention.age_of(event_type);
            ages.push(StreamAge {
                types: Pattern::new(event_type)?,
                max_age: age.map(|age| age.max(now.since(hold.since))),
            });
        }
    }
    if !ages.is_empty() && retention.max_len.is_some() {
        // A number of events knows no types.
        tracing::warn!(target: "everbus::retention", "max_len is not applied: some events have to be kept longer");
        retention.max_len = None;
    }
    ages.append(&mut retention.streams);
    retention.streams = ages;
    Ok(retention)
}

fn bucket(engine: &Engine) -> Result<Kv, Error> {
    Kv::new(engine.kv()?, BUCKET.to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_hold_keeps_more_and_never_less() {
        let now = Timestamp::from_micros(1_000_000_000_000);
        let day = Duration::from_secs(24 * 3600);
        let hold = |age: Duration| Hold {
            types: vec!["Job Created".into()],
            since: now.minus(age),
        };
        let week = Retention {
            max_age: Some(7 * day),
            max_len: Some(5),
            ..Retention::default()
        };
        let kept = with(week.clone(), &[hold(30 * day)], now).unwrap();
        assert_eq!(kept.age_of("Job Created"), Some(30 * day));
        assert_eq!(kept.age_of("order.placed"), Some(7 * day));
        assert_eq!(kept.max_len, None);
        let kept = with(week.clone(), &[hold(day)], now).unwrap();
        assert_eq!(kept.age_of("Job Created"), Some(7 * day));
        assert_eq!(with(week.clone(), &[], now).unwrap(), week);
        let kept = with(Retention::default(), &[hold(day)], now).unwrap();
        assert_eq!(kept.age_of("Job Created"), None, "for ever");
    }
}

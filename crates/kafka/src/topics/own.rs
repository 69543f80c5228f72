//! The topics without events: that of the groups, and those of dead letters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use everbus_core::{Code, Error, Result};

use super::settings::{check_own, configuration, max_bytes, raise_max_bytes};
use super::{DEAD_ROOM, DEFAULT_MAX_BYTES, create, partitions_of};
use crate::broker::Shared;
use crate::client::Link;
use crate::config::Options;

/// The topic of groups, subscriptions and topics: one partition, compacted. An existing topic that deletes its
/// records is refused.
pub(crate) async fn declare_registry(
    link: &Arc<Link>,
    name: &str,
    options: &Options,
) -> Result<()> {
    if partitions_of(link, name).await?.is_some() {
        return match configuration(link, name).await? {
            Some(config) => check_own(name, &config, true),
            None => Ok(()),
        };
    }
    let config = [("cleanup.policy", "compact"), ("retention.ms", "-1")];
    create(link, name, 1, options.copies, &config).await?;
    let begin = Instant::now();
    while partitions_of(link, name).await?.is_none() {
        if begin.elapsed() > link.timeout {
            let what = format!("the topic {name} was created and has no leader");
            return Err(Error::new(Code::Unavailable, what));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Refuses an existing topic of dead letters that deletes them.
pub(crate) async fn check_dead(link: &Arc<Link>, name: &str) -> Result<()> {
    if partitions_of(link, name).await?.is_none() {
        return Ok(());
    }
    match configuration(link, name).await? {
        Some(config) => check_own(name, &config, false),
        None => Ok(()),
    }
}

/// Creates the topic of dead letters for the topic `of`, or raises its limit. It takes this letter, and the letter of
/// every event that `of` takes.
pub(crate) async fn declare_dead(
    shared: &Shared,
    name: &str,
    of: &str,
    letter: usize,
) -> Result<()> {
    let known = |name: &str| shared.dead_topics.lock().get(name).copied();
    if known(name).is_some_and(|most| letter <= most) {
        return Ok(());
    }
    let _one = shared.declaring.lock().await;
    if known(name).is_some_and(|most| letter <= most) {
        return Ok(());
    }
    let link = &shared.link;
    let events = configuration(link, of).await?;
    let events = events.map_or(DEFAULT_MAX_BYTES, |config| max_bytes(&config));
    // A dead letter is larger than its event.
    let wanted = (events + DEAD_ROOM).max(letter);
    let mut most = wanted;
    if partitions_of(link, name).await?.is_none() {
        let bytes = wanted.to_string();
        let config = [
            ("cleanup.policy", "delete"),
            ("retention.ms", "-1"),
            ("retention.bytes", "-1"),
            ("max.message.bytes", &bytes),
        ];
        create(link, name, 1, shared.options.copies, &config).await?;
        shared.appeared(name).await?;
    } else if let Some(config) = configuration(link, name).await? {
        check_own(name, &config, false)?;
        let has = max_bytes(&config);
        if has < wanted {
            match raise_max_bytes(link, name, &config, wanted).await {
                Ok(()) => {}
                // This letter fits.
                Err(_) if letter <= has => most = has,
                Err(error) => return Err(error),
            }
        } else {
            most = has;
        }
    }
    shared.dead_topics.lock().insert(name.to_owned(), most);
    Ok(())
}

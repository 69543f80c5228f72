//! Derived event ids: publishing the same event again uses the same id.
//!
//! An id is derived from tenant, job, task, run number and type, but not from the event that caused it. So two parents
//! that complete at the same time start their child once. If all processes know the same time (the creation of the
//! job), the id begins with that time: ids that sort by time are inserted several times faster.

use everbus::{EventId, Timestamp};
use uuid::Uuid;

const NAMESPACE: Uuid = Uuid::from_u128(0x6f0b_95ab_31c4_5e0d_b1a7_d20c_9d42_7c55);

/// The parts that an id is derived from.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The tenant.
    pub tenant: &'a str,
    /// The job; empty for a task without one.
    pub job: &'a str,
    /// The task; empty for an event about the job.
    pub task: &'a str,
    /// The run of the task, or the number of tasks of the job; the time of the tick for an event of a schedule.
    pub run: u64,
    /// The event type.
    pub event_type: &'a str,
}

impl Parts<'_> {
    /// The id. It begins with `time`, which must be the same in every process. Without a time it is a plain hash.
    pub fn at(self, time: Option<Timestamp>) -> EventId {
        let mut name = Vec::with_capacity(64);
        for text in [self.tenant, self.job, self.task, self.event_type] {
            name.extend_from_slice(&(text.len() as u64).to_be_bytes());
            name.extend_from_slice(text.as_bytes());
        }
        name.extend_from_slice(&self.run.to_be_bytes());
        let hash = Uuid::new_v5(&NAMESPACE, &name);
        let millis = time.and_then(|time| u64::try_from(time.as_micros() / 1000).ok());
        let Some(millis) = millis else {
            return hash.into();
        };
        let bytes = hash.into_bytes();
        let random = std::array::from_fn(|i| bytes[i]);
        uuid::Builder::from_unix_timestamp_millis(millis, &random)
            .into_uuid()
            .into()
    }
}

/// The time in an id that ends in a UUID of version 7. Ids from [`fresh`] do.
pub fn time_in(id: &str) -> Option<Timestamp> {
    let from = id.len().checked_sub(36)?;
    let uuid = Uuid::parse_str(id.get(from..)?).ok()?;
    let (seconds, nanos) = uuid.get_timestamp()?.to_unix();
    let micros = i64::try_from(seconds).ok()?.checked_mul(1_000_000)?;
    Some(Timestamp::from_micros(micros + i64::from(nanos / 1000)))
}

/// A new id for a task or a job.
pub fn fresh(prefix: &str) -> String {
    format!("{prefix}{}", Uuid::now_v7())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTS: Parts<'_> = Parts {
        tenant: "acme",
        job: "job-1",
        task: "a",
        run: 1,
        event_type: "Task Pending",
    };

    #[test]
    fn every_part_changes_the_id_and_nothing_else_does() {
        let id = PARTS.at(None);
        assert_eq!(id, PARTS.at(None));
        for other in [
            Parts {
                tenant: "other",
                ..PARTS
            },
            Parts {
                job: "job-2",
                ..PARTS
            },
            Parts { task: "b", ..PARTS },
            Parts { run: 2, ..PARTS },
            Parts {
                event_type: "task.work",
                ..PARTS
            },
            // The same characters, divided differently between two parts.
            Parts {
                job: "job-",
                task: "1a",
                ..PARTS
            },
        ] {
            assert_ne!(id, other.at(None), "{other:?}");
        }
    }

    #[test]
    fn an_id_with_a_time_sorts_by_it() {
        let early = PARTS.at(Some(Timestamp::from_micros(1_000_000)));
        let late = Parts { task: "z", ..PARTS }.at(Some(Timestamp::from_micros(2_000_000)));
        assert!(early < late);
        assert_eq!(early.as_uuid().get_version_num(), 7);
        assert_eq!(PARTS.at(None).as_uuid().get_version_num(), 5);
    }

    #[test]
    fn a_fresh_id_tells_its_time() {
        let id = fresh("job-");
        assert!(time_in(&id).is_some(), "{id}");
        assert_eq!(time_in("req-123"), None);
        assert_eq!(time_in("ääääääääääääääääääääääääääääääääääääääää"), None);
    }
}

//! Decides which person an account belongs to.
//!
//! | seen | person | confidence |
//! |---|---|---|
//! | the account is known | its person | as before |
//! | a new account with the phone number of a known one | the same person | 0.9 |
//! | a new account with the e-mail address of a known one | the same person | 0.8 |
//! | a new account, nothing in common | a new person | 1 |
//!
//! A known account that now shows the phone number or address of another person makes the two one person: the
//! older one stays.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use everbus::rusqlite::{Connection, TransactionBehavior};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::tables::{self, Account};
use crate::events::{
    ChannelType, IdentityMerged, IdentityResolved, IdentityUpdated, MergeReason, ProfileChange,
};

/// Why a request to the service failed; a retry may help.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Profile fields that show that two accounts belong to one person, the strongest evidence first.
const EVIDENCE: [(&str, MergeReason, f64); 2] = [
    ("phone", MergeReason::SamePhone, 0.9),
    ("email", MergeReason::SameEmail, 0.8),
];

/// The sender of a message, as the platform names them.
#[derive(Clone, Debug)]
pub struct Resolve {
    /// The message. For the same message the service gives the same answer again.
    pub message_id: String,
    /// The channel.
    pub channel: ChannelType,
    /// Their id on the platform.
    pub platform_user_id: String,
    /// Their name on the platform.
    pub username: Option<String>,
    /// Profile data from the platform.
    pub profile: Map<String, Value>,
}

/// The sender, and what changed while it was identified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resolution {
    /// The person and the account.
    pub resolved: IdentityResolved,
    /// The changes of the profile.
    pub updated: Option<IdentityUpdated>,
    /// The persons that were merged.
    pub merged: Vec<IdentityMerged>,
}

/// The persons and their accounts, in a SQLite file. Clones share it.
#[derive(Clone, Debug)]
pub struct IdentityService {
    db: Arc<Mutex<Connection>>,
}

impl IdentityService {
    /// Opens the tables, and makes them if they are not there.
    pub fn open(path: &Path) -> Result<Self, Failed> {
        let db = Connection::open(path)?;
        tables::create(&db)?;
        Ok(Self {
            db: Arc::new(Mutex::new(db)),
        })
    }

    /// Identifies the sender of a message.
    pub async fn resolve(&self, request: Resolve) -> Result<Resolution, Failed> {
        self.change(move |db| {
            if let Some(answer) = tables::answer(db, &request.message_id)? {
                return Ok(serde_json::from_str(&answer)?);
            }
            let resolution = decide(db, &request)?;
            let answer = serde_json::to_string(&resolution)?;
            tables::keep_answer(db, &request.message_id, &answer)?;
            Ok(resolution)
        })
        .await
    }

    /// Merges two persons. `None` if they were merged before; an error if one of them does not exist.
    pub async fn merge(
        &self,
        target: String,
        source: String,
        reason: MergeReason,
        by: String,
    ) -> Result<Option<IdentityMerged>, Failed> {
        self.change(move |db| {
            let missing = |id: &str| format!("there is no person {id}");
            let into = tables::present(db, &target)?.ok_or_else(|| missing(&target))?;
            let from = tables::present(db, &source)?.ok_or_else(|| missing(&source))?;
            if into == from {
                return Ok(None);
            }
            let merged_identity_ids = tables::merge(db, &into, &from)?;
            Ok(Some(IdentityMerged {
                target_person_id: into,
                source_person_id: from,
                merged_identity_ids,
                reason,
                evidence: None,
                merged_by: Some(by),
            }))
        })
        .await
    }

    /// How many persons and accounts there are.
    pub async fn count(&self) -> Result<(u32, u32), Failed> {
        self.change(|db| Ok(tables::count(db)?)).await
    }

    /// Runs `work` in a transaction, on a thread where it may block.
    async fn change<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T, Failed> {
        let db = self.db.clone();
        let done = tokio::task::spawn_blocking(move || {
            let mut db = db.lock().unwrap_or_else(PoisonError::into_inner);
            let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&tx)?;
            tx.commit()?;
            Ok(value)
        });
        done.await?
    }
}

fn new_id() -> String {
    // Ids of version 7 sort by time: of two persons the older one has the smaller id.
    Uuid::now_v7().to_string()
}

fn decide(db: &Connection, request: &Resolve) -> Result<Resolution, Failed> {
    let (channel, user) = (
        request.channel.0.as_str(),
        request.platform_user_id.as_str(),
    );
    let known = tables::account(db, channel, user)?;
    let is_new_identity = known.is_none();
    let mut is_new_person = false;
    let mut account = match known {
        Some(account) => account,
        None => {
            let (person, confidence) = match related(db, &request.profile)? {
                Some(found) => found,
                None => {
                    is_new_person = true;
                    let person = new_id();
                    tables::add_person(db, &person)?;
                    (person, 1.0)
                }
            };
            Account {
                id: new_id(),
                person,
                confidence,
                profile: Map::new(),
            }
        }
    };
    let changes = learn(&mut account.profile, request);
    tables::put_account(db, channel, user, &account)?;
    let merged = unite(db, &mut account)?;
    let updated = (!is_new_identity && !changes.is_empty()).then(|| IdentityUpdated {
        identity_id: account.id.clone(),
        person_id: account.person.clone(),
        changes,
    });
    Ok(Resolution {
        resolved: IdentityResolved {
            message_id: Some(request.message_id.clone()),
            person_id: account.person,
            identity_id: account.id,
            channel: request.channel.clone(),
            platform_user_id: request.platform_user_id.clone(),
            is_new_person,
            is_new_identity,
            confidence: account.confidence,
        },
        updated,
        merged,
    })
}

/// The person with the same phone number or e-mail address as a new account, and the confidence.
fn related(db: &Connection, profile: &Map<String, Value>) -> Result<Option<(String, f64)>, Failed> {
    for (field, _, confidence) in EVIDENCE {
        if let Some(value) = profile.get(field).and_then(Value::as_str)
            && let Some(person) = tables::person_with(db, field, value, "")?
        {
            return Ok(Some((person, confidence)));
        }
    }
    Ok(None)
}

/// Copies the sender's data from the message into the profile, and returns the changes.
fn learn(profile: &mut Map<String, Value>, request: &Resolve) -> Vec<ProfileChange> {
    let username = request.username.as_ref().map(|name| json!(name));
    let username = username.map(|name| ("username".to_owned(), name));
    let told = request.profile.clone().into_iter().chain(username);
    let mut changes = Vec::new();
    for (field, new_value) in told {
        let old_value = profile.insert(field.clone(), new_value.clone());
        if old_value.as_ref() != Some(&new_value) {
            changes.push(ProfileChange {
                field,
                old_value: old_value.unwrap_or(Value::Null),
                new_value,
            });
        }
    }
    changes
}

/// Merges every other person that has the same phone number or e-mail address as this account.
fn unite(db: &Connection, account: &mut Account) -> Result<Vec<IdentityMerged>, Failed> {
    let mut merged = Vec::new();
    for (field, reason, _) in EVIDENCE {
        let value = account.profile.get(field).and_then(Value::as_str);
        let Some(value) = value.map(str::to_owned) else {
            continue;
        };
        while let Some(other) = tables::person_with(db, field, &value, &account.person)? {
            let mut pair = [account.person.clone(), other];
            pair.sort_unstable();
            let [target, source] = pair;
            let merged_identity_ids = tables::merge(db, &target, &source)?;
            account.person.clone_from(&target);
            let evidence = Map::from_iter([(field.to_owned(), json!(value))]);
            merged.push(IdentityMerged {
                target_person_id: target,
                source_person_id: source,
                merged_identity_ids,
                reason,
                evidence: Some(evidence),
                merged_by: Some("system".to_owned()),
            });
        }
    }
    Ok(merged)
}

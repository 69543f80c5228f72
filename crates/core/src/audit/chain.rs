//! The hash chain of the audit trail: the hash of each record covers the record and the hash before it, so
//! that one hash stands for everything up to it. Every engine uses the same encoding.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use crate::error::{Code, Error, Result};
use crate::time::Timestamp;

/// A link of the chain: SHA-256. It displays as 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AuditHash([u8; 32]);

impl AuditHash {
    /// The hash before the first record.
    pub const ORIGIN: Self = Self([0; 32]);

    /// From its bytes, if it has the right number of them.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for AuditHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for AuditHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for AuditHash {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let digit = |c: u8| {
            char::from(c)
                .to_digit(16)
                .and_then(|d| u8::try_from(d).ok())
        };
        let bytes: Option<Vec<u8>> = match text.len() {
            64 => text
                .as_bytes()
                .chunks_exact(2)
                .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
                .collect(),
            _ => None,
        };
        bytes.and_then(|b| Self::from_bytes(&b)).ok_or_else(|| {
            Error::new(Code::InvalidSetting, format!("{text:?} is not a hash"))
                .hint("the hash of an audit record has 64 hex digits")
        })
    }
}

impl Serialize for AuditHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AuditHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The head of the chain: its last record. A copy kept elsewhere proves later that nothing up to it was
/// changed. It displays and parses as `SEQ:HASH`.
///
/// ```
/// use everbus_core::AuditHead;
/// let text = format!("7:{}", "0f".repeat(32));
/// let head: AuditHead = text.parse()?;
/// assert_eq!((head.seq, head.to_string()), (7, text));
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AuditHead {
    /// The number of the record.
    pub seq: u64,
    /// Its hash.
    pub hash: AuditHash,
}

impl AuditHead {
    /// The head of an empty chain.
    pub const ORIGIN: Self = Self {
        seq: 0,
        hash: AuditHash::ORIGIN,
    };
}

impl fmt::Display for AuditHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.seq, self.hash)
    }
}

impl FromStr for AuditHead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::new(
                Code::InvalidSetting,
                format!("{text:?} is not the head of an audit trail"),
            )
            .hint("it is SEQ:HASH, as `everbus audit head` prints it")
        };
        let (seq, hash) = text.split_once(':').ok_or_else(bad)?;
        if seq.is_empty() || !seq.bytes().all(|b| b.is_ascii_digit()) {
            return Err(bad());
        }
        Ok(Self {
            seq: seq.parse().map_err(|_| bad())?,
            hash: hash.parse().map_err(|_| bad())?,
        })
    }
}

/// The content of a record for hashing: every field as stored, the details as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditContent<'a> {
    /// Its number.
    pub seq: u64,
    /// When it was written.
    pub at: Timestamp,
    /// The actor.
    pub actor: &'a str,
    /// The action.
    pub action: &'a str,
    /// The kind of the target.
    pub entity_type: Option<&'a str>,
    /// The id of the target.
    pub entity_id: Option<&'a str>,
    /// The tenant.
    pub tenant: Option<&'a str>,
    /// The correlation id.
    pub correlation_id: Option<&'a str>,
    /// The trace.
    pub trace_id: Option<&'a str>,
    /// The details, as JSON text.
    pub details: Option<&'a str>,
}

impl AuditContent<'_> {
    /// The hash of the record that follows the one with the hash `previous`. Each text is hashed with its
    /// presence and its length, so no two records have the same encoding.
    pub fn hash(&self, previous: &AuditHash) -> AuditHash {
        let mut hasher = Sha256::new();
        hasher.update(b"everbus-audit-1\n");
        hasher.update(previous.as_bytes());
        hasher.update(self.seq.to_le_bytes());
        hasher.update(self.at.as_micros().to_le_bytes());
        for text in [
            Some(self.actor),
            Some(self.action),
            self.entity_type,
            self.entity_id,
            self.tenant,
            self.correlation_id,
            self.trace_id,
            self.details,
        ] {
            hasher.update([u8::from(text.is_some())]);
            let text = text.unwrap_or_default();
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
        AuditHash(hasher.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content() -> AuditContent<'static> {
        AuditContent {
            seq: 3,
            at: Timestamp::from_micros(5),
            actor: "alice",
            action: "order.refund",
            entity_type: Some("ORDER"),
            entity_id: Some("123"),
            tenant: None,
            correlation_id: Some("c"),
            trace_id: None,
            details: Some("{}"),
        }
    }

    // conformance: memory/audit-encoding: the hash covers every field and the hash before it, and no two records share an encoding
    #[test]
    fn the_hash_covers_every_field_and_the_one_before() {
        let base = content();
        let origin = AuditHash::ORIGIN;
        let first = base.hash(&origin);
        let others = [
            AuditContent { seq: 4, ..base },
            AuditContent {
                at: Timestamp::from_micros(6),
                ..base
            },
            AuditContent {
                actor: "alic",
                action: "eorder.refund",
                ..base
            },
            AuditContent {
                action: "order.refunds",
                ..base
            },
            AuditContent {
                entity_type: None,
                ..base
            },
            AuditContent {
                entity_type: Some("ORDER1"),
                entity_id: Some("23"),
                ..base
            },
            AuditContent {
                entity_id: Some(""),
                ..base
            },
            AuditContent {
                entity_id: None,
                ..base
            },
            AuditContent {
                tenant: Some(""),
                ..base
            },
            AuditContent {
                tenant: Some("c"),
                correlation_id: None,
                ..base
            },
            AuditContent {
                trace_id: Some("t"),
                ..base
            },
            AuditContent {
                details: None,
                ..base
            },
            AuditContent {
                details: Some("{ }"),
                ..base
            },
        ];
        let mut seen = std::collections::HashSet::from([first, base.hash(&first)]);
        for other in others {
            assert!(seen.insert(other.hash(&origin)), "{other:?}");
        }
        assert_eq!(first, content().hash(&origin), "it depends on nothing else");
        // Stored chains must always verify: the encoding never changes.
        assert_eq!(
            first.to_string(),
            "7ca8a90fbb84fdcc081ff60af42f273b51282ea300f8f12265d4c724ee737fee"
        );
    }

    #[test]
    fn heads_are_read_as_they_are_printed_and_nothing_else_is() {
        let head = AuditHead {
            seq: 12,
            hash: content().hash(&AuditHash::ORIGIN),
        };
        assert_eq!(head.to_string().parse::<AuditHead>().unwrap(), head);
        let hash = head.hash.to_string();
        for bad in [
            String::new(),
            "12".into(),
            "12:".into(),
            format!(":{hash}"),
            format!("-1:{hash}"),
            format!("+1:{hash}"),
            format!("1:{}", &hash[2..]),
            format!("1:{hash}0"),
            format!("1:{}zz", &hash[2..]),
            format!("1:{}é", &hash[2..]),
            format!("99999999999999999999:{hash}"),
        ] {
            let error = bad.parse::<AuditHead>().unwrap_err();
            assert_eq!(error.code(), Code::InvalidSetting, "{bad:?}");
        }
    }
}

//! The checksum of an event. It finds damage that SQLite does not notice, such as a flipped bit in a payload.
//!
//! CRC-32 finds every single flipped bit and every burst of up to 32 bits. It guards against failing disks
//! and memory, not against people: they can compute it too.

/// The columns of a row that the checksum covers: all of them, with the name of the type.
pub(crate) struct Columns<'a> {
    pub(crate) seq: i64,
    pub(crate) id: &'a [u8],
    pub(crate) tenant: i64,
    pub(crate) event_type: &'a str,
    pub(crate) version: u32,
    pub(crate) occurred_at: i64,
    pub(crate) received_at: i64,
    pub(crate) attrs: Option<&'a [u8]>,
    pub(crate) payload: &'a [u8],
}

impl Columns<'_> {
    /// The checksum as it is stored: signed, so that it takes four bytes.
    pub(crate) fn checksum(&self) -> i32 {
        let mut fixed = [0; 56];
        let numbers = [
            self.seq,
            self.tenant,
            i64::from(self.version),
            self.occurred_at,
            self.received_at,
            // The lengths are covered too. No attributes differ from empty attributes.
            self.attrs.map_or(-1, length),
            length(self.event_type.as_bytes()),
        ];
        for (bytes, number) in fixed.chunks_exact_mut(8).zip(numbers) {
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&fixed);
        hasher.update(self.id);
        hasher.update(self.event_type.as_bytes());
        hasher.update(self.attrs.unwrap_or_default());
        hasher.update(self.payload);
        hasher.finalize().cast_signed()
    }
}

fn length(bytes: &[u8]) -> i64 {
    i64::try_from(bytes.len()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns<'a>(attrs: Option<&'a [u8]>, event_type: &'a str, payload: &'a [u8]) -> Columns<'a> {
        Columns {
            seq: 1,
            id: &[7; 16],
            tenant: 2,
            event_type,
            version: 3,
            occurred_at: 4,
            received_at: 5,
            attrs,
            payload,
        }
    }

    /// Files of users hold these numbers, so they never change.
    #[test]
    fn the_checksum_of_an_event_is_fixed() {
        let known = columns(Some(b"{}"), "a.b", b"1").checksum();
        assert_eq!(known, KNOWN);
        let others = [
            columns(None, "a.b", b"1"),
            columns(Some(b""), "a.b", b"1"),
            columns(Some(b"{}1"), "a.b", b""),
            columns(Some(b"{"), "a.b", b"}1"),
            columns(Some(b"{}"), "a.", b"b1"),
            columns(Some(b"{}"), "a.b", b"0"),
        ];
        let mut seen = vec![known];
        for other in others {
            let sum = other.checksum();
            assert!(!seen.contains(&sum));
            seen.push(sum);
        }
    }

    const KNOWN: i32 = 1_680_828_930;
}

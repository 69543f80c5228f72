//! The checksum of an event. It finds damage that the server does not notice when its own page checksums are
//! off, such as a flipped bit in a payload.
//!
//! CRC-32 finds every single flipped bit and every burst of up to 32 bits. It guards against failing disks
//! and memory, not against people: they can compute it too. The position and the time of receipt are given by
//! the server and not covered.

/// The columns of a row that the checksum covers.
pub(crate) struct Columns<'a> {
    pub(crate) id: &'a [u8],
    pub(crate) event_type: &'a str,
    pub(crate) version: u32,
    pub(crate) occurred_at: i64,
    pub(crate) attrs: Option<&'a [u8]>,
    pub(crate) payload: &'a [u8],
}

impl Columns<'_> {
    /// The checksum as it is stored.
    pub(crate) fn checksum(&self) -> i32 {
        let mut fixed = [0; 32];
        let numbers = [
            i64::from(self.version),
            self.occurred_at,
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

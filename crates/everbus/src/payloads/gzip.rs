//! Compression, and decompression that stops: at the recorded size, and at the largest a stage may have.

use std::io::{Read as _, Write as _};

use bytes::Bytes;
use everbus_core::{Code, Error, Result, StageInfo};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::LARGEST_STAGE;

/// Room for this much is made before anything is known to be true.
const FIRST: usize = 1024 * 1024;

pub(super) fn compress(content: &[u8]) -> Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let compressed = encoder.write_all(content).and_then(|()| encoder.finish());
    compressed
        .map(Bytes::from)
        .map_err(|e| Error::new(Code::Internal, "a payload could not be compressed").caused_by(e))
}

/// The content of a stage. Never reads more than one byte beyond what was recorded.
pub(super) fn decompress(info: &StageInfo, compressed: &[u8]) -> Result<Bytes> {
    let damaged = |what: String| {
        Error::new(
            Code::Corrupt,
            format!("the stage {} of {} {what}", info.stage, info.timestamp),
        )
        .hint("its event and the other stages are not affected; it goes with the retention")
    };
    let expected = usize::try_from(info.payload_size_original).unwrap_or(usize::MAX);
    if expected > LARGEST_STAGE {
        return Err(damaged(format!(
            "is said to have {expected} bytes, more than the {LARGEST_STAGE} a stage may have"
        )));
    }
    let mut content = Vec::with_capacity(expected.min(FIRST));
    let decoder = GzDecoder::new(compressed);
    decoder
        .take(expected as u64 + 1)
        .read_to_end(&mut content)
        .map_err(|e| damaged(format!("cannot be decompressed: {e}")).caused_by(e))?;
    if content.len() > expected {
        return Err(damaged(format!(
            "decompresses to more than the {expected} bytes that were recorded"
        )));
    }
    if content.len() < expected {
        return Err(damaged(format!(
            "decompresses to {} bytes, and {expected} were recorded",
            content.len()
        )));
    }
    Ok(content.into())
}

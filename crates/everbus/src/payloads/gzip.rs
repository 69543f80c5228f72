//! Compression, and decompression with limits: the recorded size, and the largest size of a stage.

use std::io::{Read as _, Write as _};

use bytes::Bytes;
use everbus_core::{Code, Error, Result, StageInfo};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use super::LARGEST_STAGE;

/// The largest buffer that is allocated before the recorded size is verified.
const FIRST: usize = 1024 * 1024;

pub(super) fn compress(content: &[u8]) -> Result<Bytes> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let compressed = encoder.write_all(content).and_then(|()| encoder.finish());
    compressed
        .map(Bytes::from)
        .map_err(|e| Error::new(Code::Internal, "a payload could not be compressed").caused_by(e))
}

/// The content of a stage. Reads at most one byte more than was recorded.
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
            "has a recorded size of {expected} bytes, more than the {LARGEST_STAGE} a stage may have"
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

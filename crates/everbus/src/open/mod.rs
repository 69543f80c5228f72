//! Opening a bus: its builder, the configuration file, and the engine that a URL names.

pub(crate) mod builder;
#[cfg(feature = "config")]
mod configure;
pub(crate) mod engines;

use everbus_core::Result;

use crate::runtime::bus::Bus;
use builder::BusBuilder;

impl Bus {
    /// Opens a bus with the default settings: `sqlite:FILE` or a bare path for a file on disk,
    /// `memory:` for events that need not survive the process.
    pub async fn open(url: impl AsRef<str>) -> Result<Bus> {
        Self::builder().open(url).await
    }

    /// Begins a bus with custom settings.
    pub fn builder() -> BusBuilder {
        BusBuilder::default()
    }
}

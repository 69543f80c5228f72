//! How durable an acknowledged event is, and which settings of a server keep it from being more durable.

use std::fmt;

use serde::Serialize;

use crate::engine::Engine;
use crate::error::{Code, Error, Result};

/// The durability of an acknowledged event, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Lost with the process.
    Memory,
    /// Survives the process; a power loss may lose the last moments.
    Process,
    /// On the disk before the publish returns: survives power loss.
    PowerLoss,
    /// On several machines.
    Replicated,
}

impl Durability {
    /// Every grade, from the weakest to the strongest.
    pub const ALL: [Self; 4] = [
        Self::Memory,
        Self::Process,
        Self::PowerLoss,
        Self::Replicated,
    ];

    /// Its name in configuration files and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Process => "process",
            Self::PowerLoss => "power_loss",
            Self::Replicated => "replicated",
        }
    }

    /// What survives, in a few words.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Memory => "is lost when the process that holds it ends",
            Self::Process => {
                "survives kill -9 of every process; a power loss may lose the last moments"
            }
            Self::PowerLoss => "survives a power loss",
            Self::Replicated => "survives the loss of a machine",
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A setting that makes an engine less durable than it could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Weakness {
    /// The name of the setting, as the server has it.
    pub setting: String,
    /// Its value.
    pub value: String,
    /// What may be lost because of it, and how to change it.
    pub advice: String,
}

impl Weakness {
    /// A setting with its value, and the advice how to change it.
    pub fn new(
        setting: impl Into<String>,
        value: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            setting: setting.into(),
            value: value.into(),
            advice: advice.into(),
        }
    }
}

impl fmt::Display for Weakness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}: {}", self.setting, self.value, self.advice)
    }
}

impl Engine {
    /// Refuses an engine that is less durable than required, and names the settings to change.
    pub fn require_durability(&self, required: Durability) -> Result<()> {
        let capabilities = self.broker.capabilities();
        let (engine, offered) = (capabilities.engine, capabilities.durability);
        if offered >= required {
            return Ok(());
        }
        let what = format!(
            "the {engine} engine offers the durability {offered} ({}), and {required} is required",
            offered.meaning()
        );
        let settings: Vec<String> = self.weaknesses.iter().map(Weakness::to_string).collect();
        let hint = if settings.is_empty() {
            format!("require {offered}, or choose an engine that offers {required}")
        } else {
            settings.join("; ")
        };
        Err(Error::new(Code::NotDurable, what).hint(hint))
    }
}

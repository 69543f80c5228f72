//! `everbus payloads`, and the stages that `everbus get --payloads` shows.

use everbus::payloads::{self, LARGE_PAYLOAD, LARGEST_LISTED, Stage, StageContent};
use everbus_core::{Engine, EventKey, Recorded, StageInfo};
use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::open::{Target, close};
use crate::output::{Output, Table, escaped, shortened};
use crate::stop::Outcome;
use crate::values::parse_page;
use crate::when;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum PayloadsCommand {
    /// List the largest payload stages, largest first
    Largest(LargestArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct LargestArgs {
    /// Only those of more than this many bytes before compression; 512k and 8m are understood
    #[arg(
        long,
        value_name = "BYTES",
        default_value_t = LARGE_PAYLOAD,
        allow_hyphen_values = true,
        value_parser = parse_over
    )]
    over: u64,

    /// At most this many, up to 10000
    #[arg(
        long,
        value_name = "N",
        default_value_t = LARGEST_LISTED,
        value_parser = parse_page,
        allow_negative_numbers = true
    )]
    limit: usize,
}

fn parse_over(text: &str) -> Result<u64, String> {
    if text.trim() == "0" {
        return Ok(0);
    }
    crate::values::parse_bytes(text).map(|bytes| bytes as u64)
}

/// Which stages `get` shows, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct StageArgs {
    /// Show the payload stages of the event too: what it looked like at each step
    #[arg(long)]
    pub(crate) payloads: bool,

    /// Only the stages of this name, for example agent_request
    #[arg(long, value_name = "NAME", requires = "payloads", value_parser = parse_stage)]
    stage: Option<Stage>,

    /// Print the stages as rows of the table event_payloads, one JSON object per line, the content as
    /// base64 of its gzip
    #[arg(long, requires = "payloads")]
    pub(crate) export: bool,
}

fn parse_stage(text: &str) -> Result<Stage, String> {
    Stage::new(text).map_err(|e| match e.hint_text() {
        Some(hint) => format!("{}: {hint}", e.message()),
        None => e.message().to_owned(),
    })
}

pub(crate) async fn run(command: PayloadsCommand, target: &Target, output: &mut Output) -> Outcome {
    let PayloadsCommand::Largest(args) = command;
    let engine = target.open_existing().await?;
    let outcome = largest(&args, &engine, output).await;
    close(&engine).await;
    outcome
}

async fn largest(args: &LargestArgs, engine: &Engine, output: &mut Output) -> Outcome {
    #[derive(Serialize)]
    struct Large<'a> {
        event: &'a EventKey,
        #[serde(flatten)]
        info: &'a StageInfo,
    }
    let found = engine.payloads()?.largest(args.over, args.limit).await?;
    if output.is_json() {
        let large = found.iter().map(|(event, info)| Large { event, info });
        return output.json(&large.collect::<Vec<_>>());
    }
    if found.is_empty() {
        return output.line(format!("no stage of more than {} bytes", args.over));
    }
    let mut table = Table::new(&[
        "EVENT", "TENANT", "STAGE", "BYTES", "STORED", "TIME", "FLAGS",
    ]);
    for (event, info) in &found {
        let tenant = event.tenant.as_deref().unwrap_or_default();
        table.row(vec![
            event.id.to_string(),
            shortened(&escaped(tenant), 24).into_owned(),
            escaped(info.stage.as_str()).into_owned(),
            info.payload_size_original.to_string(),
            info.payload_size_compressed.to_string(),
            when::shown(info.timestamp),
            flags(info),
        ]);
    }
    table.print(output)
}

fn flags(info: &StageInfo) -> String {
    let flags = [
        (info.contains_media, "media"),
        (info.contains_base64, "base64"),
    ];
    let set = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name);
    set.collect::<Vec<_>>().join(",")
}

/// One stage in JSON output. It is decompressed while it is printed, and not kept.
pub(super) struct Shown(StageContent);

impl Serialize for Shown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Fields<'a> {
            #[serde(flatten)]
            info: &'a StageInfo,
            /// The content: as JSON if it is JSON, otherwise as text.
            #[serde(skip_serializing_if = "Option::is_none")]
            payload: Option<Box<RawValue>>,
            /// Why it cannot be shown.
            #[serde(skip_serializing_if = "Option::is_none")]
            damaged: Option<String>,
        }
        let (payload, damaged) = match self.0.bytes() {
            Ok(content) => (as_json(&content), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let info = &self.0.info;
        let fields = Fields {
            info,
            payload,
            damaged,
        };
        fields.serialize(serializer)
    }
}

fn as_json(content: &[u8]) -> Option<Box<RawValue>> {
    let parsed = serde_json::from_slice(content).ok();
    parsed.or_else(|| {
        let text = Value::String(String::from_utf8_lossy(content).into_owned());
        serde_json::value::to_raw_value(&text).ok()
    })
}

impl StageArgs {
    async fn stages(&self, record: &Recorded, engine: &Engine) -> Outcome<Vec<StageContent>> {
        let key = EventKey::of(&record.event);
        let stored = engine.payloads()?.stages(key, self.stage.clone()).await?;
        Ok(payloads::unpacked(stored).await?)
    }

    /// The stages for `-o json`, if they were asked for.
    pub(super) async fn shown(
        &self,
        record: &Recorded,
        engine: &Engine,
    ) -> Outcome<Option<Vec<Shown>>> {
        if !self.payloads {
            return Ok(None);
        }
        let stages = self.stages(record, engine).await?;
        Ok(Some(stages.into_iter().map(Shown).collect()))
    }

    /// Prints the stages as text, if they were asked for.
    pub(super) async fn print(
        &self,
        record: &Recorded,
        engine: &Engine,
        output: &mut Output,
    ) -> Outcome {
        if !self.payloads {
            return Ok(());
        }
        let stages = self.stages(record, engine).await?;
        if stages.is_empty() {
            return output.line("stages       none");
        }
        for stage in &stages {
            print_stage(stage, output)?;
        }
        Ok(())
    }

    /// Prints the stages as rows of the table `event_payloads`, one per line.
    pub(super) async fn print_export(
        &self,
        record: &Recorded,
        engine: &Engine,
        output: &mut Output,
    ) -> Outcome {
        let key = EventKey::of(&record.event);
        let stored = engine.payloads()?.stages(key, self.stage.clone()).await?;
        for row in payloads::exported(record.event.id(), stored) {
            output.json(&row)?;
        }
        Ok(())
    }
}

fn print_stage(stage: &StageContent, output: &mut Output) -> Outcome {
    let info = &stage.info;
    let mut line = format!(
        "stage        {} {}, {} bytes ({} stored)",
        escaped(info.stage.as_str()),
        when::shown(info.timestamp),
        info.payload_size_original,
        info.payload_size_compressed,
    );
    if let Some(code) = info.status_code {
        line.push_str(&format!(", status {code}"));
    }
    let flags = flags(info);
    if !flags.is_empty() {
        line.push_str(&format!(", {flags}"));
    }
    output.line(line)?;
    if let Some(details) = &info.error_details {
        output.line(format!("             error: {}", escaped(details)))?;
    }
    match stage.bytes() {
        Ok(content) => match std::str::from_utf8(&content) {
            Ok(text) => output.line(format!("             {}", escaped(text))),
            Err(_) => output.line(format!(
                "             ({} bytes that are no text)",
                content.len()
            )),
        },
        Err(error) => output.line(format!("             {}", escaped(&error.to_string()))),
    }
}

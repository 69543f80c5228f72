//! `everbus consume`: runs the consumers of a configuration file without a server, in one process or several.

use clap::Args as ClapArgs;
use everbus::config::{Consumer, Delivery};
use everbus::{Config, workers};
use everbus_server::{ServerOptions, mount_consumer};

use crate::open::Target;
use crate::output::{Output, escaped};
use crate::stop::{Outcome, Stop};
use crate::values::parse_whole_rate;

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The consumers are those of --config with a command (exec) or a webhook. All processes belong to the same groups, and \
each event goes to one of the processes. A process that dies is started again, and the events that it had in flight are \
delivered again. `everbus serve` runs the same consumers in its own process.

Ctrl-C or SIGTERM ends it: handlers under way finish first. The exit code is 0 if every process ended well.")]
pub(crate) struct ConsumeArgs {
    /// Only these consumers, by their names in the file [default: all that have a command or a webhook]
    #[arg(value_name = "CONSUMER")]
    consumers: Vec<String>,

    /// How many processes share the work; one that dies is started again
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_whole_rate)]
    workers: u32,
}

pub(crate) async fn run(args: ConsumeArgs, target: &Target, output: &mut Output) -> Outcome {
    // A wrong configuration is reported once, and not by every process.
    let config = target.load_config()?.ok_or_else(|| {
        Stop::usage(
            "there is no configuration file",
            Some("name it: everbus --config everbus.yaml consume"),
        )
    })?;
    let chosen = choose(&args.consumers, &config)?;
    super::in_processes(
        args.workers,
        workers::GRACE,
        output,
        async |process, output| serve(&config, &chosen, target, process, output).await,
    )
    .await
}

fn has_handler(consumer: &Consumer) -> bool {
    matches!(
        consumer.delivery,
        Some(Delivery::Webhook(_) | Delivery::Exec(_))
    )
}

/// The consumers of these names, or all that have a handler.
fn choose<'a>(names: &[String], config: &'a Config) -> Outcome<Vec<&'a Consumer>> {
    let all = || config.consumers.iter().filter(|one| has_handler(one));
    let hint =
        "a consumer has a handler here with exec or webhook; others have theirs in a program";
    if names.is_empty() {
        let chosen: Vec<&Consumer> = all().collect();
        return match chosen.is_empty() {
            true => Err(Stop::usage(
                "no consumer of the file has a command or a webhook",
                Some(hint),
            )),
            false => Ok(chosen),
        };
    }
    let mut chosen: Vec<&Consumer> = Vec::new();
    for name in names {
        let known = config.consumers.iter().find(|one| one.name == *name);
        let Some(consumer) = known else {
            let what = format!("the file has no consumer {name:?}");
            let names = config.consumers.iter().map(|one| one.name.as_str());
            let names = format!("its consumers are {}", names.collect::<Vec<_>>().join(", "));
            return Err(Stop::usage(what, Some(&names)));
        };
        if !has_handler(consumer) {
            let what = format!("the consumer {name:?} has no command and no webhook");
            return Err(Stop::usage(what, Some(hint)));
        }
        if !chosen.iter().any(|one| one.name == *name) {
            chosen.push(consumer);
        }
    }
    Ok(chosen)
}

/// Consumes until the process is told to stop.
async fn serve(
    config: &Config,
    chosen: &[&Consumer],
    target: &Target,
    process: &workers::Worker,
    output: &mut Output,
) -> Outcome {
    let private = ServerOptions::from_config(config).private_webhooks;
    let bus = target.open_serving_bus().await?;
    for consumer in chosen {
        mount_consumer(&bus, consumer, private).await?;
    }
    bus.start().await?;
    let names: Vec<&str> = chosen.iter().map(|one| one.name.as_str()).collect();
    if output.is_json() {
        let pid = std::process::id();
        output.json(&serde_json::json!({ "consuming": names, "pid": pid }))?;
    } else {
        let names = names.join(", ");
        output.line(format!("consuming: {}; Ctrl-C ends it", escaped(&names)))?;
    }
    output.flush()?;
    process.stopping().await;
    let ended = bus.shutdown().await?;
    if ended.abandoned > 0 {
        tracing::warn!(target: "everbus::consume", abandoned = ended.abandoned, "handlers were still running; their events are delivered again");
    }
    Ok(())
}

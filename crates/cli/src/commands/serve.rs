//! `everbus serve`: the server and its dashboard.

use std::net::SocketAddr;

use clap::Args as ClapArgs;
use everbus_server::{Metrics, Server, ServerOptions, Tls};

use crate::args::Args;
use crate::interrupt::Interrupt;
use crate::open::Target;
use crate::output::{Output, escaped};
use crate::stop::{Outcome, Stop};
use crate::values::parse_listen;

/// The file of the demo, unless the command line names another one.
const DEMO_FILE: &str = "everbus-serve-demo.db";

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Without tokens the server listens on loopback only and answers everyone there: the development default. \
`everbus token create NAME --scope read` makes the first token; from then on every request needs one, and the \
server may listen on any address.

Ctrl-C or SIGTERM ends it: requests and handlers under way finish first.")]
pub(crate) struct ServeArgs {
    /// The address to listen on; port 0 chooses a free one [default: 127.0.0.1:7770]
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "EVERBUS_LISTEN",
        hide_env_values = true,
        value_parser = parse_listen
    )]
    listen: Option<SocketAddr>,

    /// Run a small shop beside it, so that there is something to see: orders, payments, failures
    #[arg(long)]
    pub(crate) demo: bool,

    /// The certificate, in PEM, to serve HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<std::path::PathBuf>,

    /// The private key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<std::path::PathBuf>,
}

pub(crate) async fn run(serve: ServeArgs, args: &Args, output: &mut Output) -> Outcome {
    let interrupt = Interrupt::listen();
    let mut target = Target::choose(args)?;
    if serve.demo && target.is_default(args) {
        // The events of the demo do not mix with those of a file that was here before.
        target = Target::file(DEMO_FILE.as_ref());
    }
    let config = target.load_config()?;
    let mut options = config
        .as_ref()
        .map_or_else(ServerOptions::default, ServerOptions::from_config);
    options.demo = serve.demo;
    options.task_index = super::jobs_on::index_file(&target);
    if let Some(listen) = serve.listen {
        options.listen = listen;
    }
    if let (Some(cert), Some(key)) = (serve.tls_cert, serve.tls_key) {
        options.tls = Some(Tls { cert, key });
    }
    // The recorder is installed before the bus is opened: the bus reports to the recorder that it finds.
    Metrics::install();
    let bus = target.open_serving_bus().await?;
    let server = match Server::bind(bus.clone(), config, options).await {
        Ok(server) => server,
        Err(error) => {
            let _ = bus.shutdown().await;
            return Err(error.into());
        }
    };
    let (url, place) = (server.url(), target.label());
    if output.is_json() {
        output
            .json(&serde_json::json!({ "listening": url, "store": place, "demo": serve.demo }))?;
    } else {
        output.line(format!("everbus {url}  ({})", escaped(&place)))?;
        if serve.demo {
            output.line("the demo shop is open; stop it with Ctrl-C")?;
        }
    }
    output.flush()?;
    let ended = server.run(async move { interrupt.wait().await }).await?;
    if ended.abandoned > 0 || ended.unsettled > 0 {
        return Err(Stop::Io(format!(
            "{} handlers did not finish in time; their events are delivered again",
            ended.abandoned + ended.unsettled
        )));
    }
    Ok(())
}

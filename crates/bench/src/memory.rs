//! Resident memory, measured in separate processes: after a million events published and handled, and with a
//! backlog of a million for slow handlers.

use everbus_core::Result;

use crate::figure::round;
use crate::{Bench, Figure, children};

const LIMIT_MIB: f64 = 40.0;

pub(crate) async fn measure(bench: &Bench) -> Result<Figure> {
    let events = bench.scaled(1_000_000);
    let mut used = Vec::new();
    for part in [children::HANDLE, children::BACKLOG] {
        bench.say(format!("{part}, {events} events"));
        let path = bench.file("memory.db")?;
        let mut child = children::spawn(part, &path, events)?;
        let line = child.wait_for_line().await?;
        child.wait()?;
        bench.remove(&path);
        used.push(children::Resident::parse(&line)?);
    }
    let most = used.iter().map(|r| r.now_mib).fold(0.0, f64::max);
    let met = most > 0.0 && most < LIMIT_MIB;
    let mut figure = Figure::target("< 40 MiB resident", met);
    figure.rss_mib = Some(round(most, 1));
    if let [handled, backlog] = used.as_slice() {
        figure.detail = format!(
            "{events} handled: {:.1} MiB (peak {:.1}); backlog of {events}: {:.1} MiB (peak {:.1})",
            handled.now_mib, handled.peak_mib, backlog.now_mib, backlog.peak_mib
        );
    }
    Ok(figure)
}

//! Options shared by lists that are read page by page: a range of time, an order, a limit.

use clap::ValueEnum;
use everbus_core::{Order, Timestamp};

use crate::suggest::Suggestion;
use crate::values::parse_page;
use crate::when;

#[derive(Debug, clap::Args)]
pub(crate) struct PageArgs {
    /// Only at or after this time: 2026-01-31T12:00:00Z, 2026-01-31, or how long ago (2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = when::parse_past, allow_hyphen_values = true)]
    pub(crate) since: Option<Timestamp>,

    /// Only at or before this time
    #[arg(long, value_name = "TIME", value_parser = when::parse, allow_hyphen_values = true)]
    pub(crate) until: Option<Timestamp>,

    /// Which come first
    #[arg(long, value_enum, default_value = "newest")]
    order: OrderArg,

    /// At most this many, up to 10000
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        value_parser = parse_page,
        allow_negative_numbers = true
    )]
    pub(crate) limit: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderArg {
    Newest,
    Oldest,
}

impl PageArgs {
    pub(crate) fn order(&self) -> Order {
        match self.order {
            OrderArg::Newest => Order::Newest,
            OrderArg::Oldest => Order::Oldest,
        }
    }

    /// Adds these options to the command for the next page.
    pub(crate) fn repeated(&self, command: Suggestion) -> Suggestion {
        let oldest = (self.order == OrderArg::Oldest).then_some("oldest");
        command
            .option("--since", self.since)
            .option("--until", self.until)
            .option("--order", oldest)
            .option("--limit", Some(self.limit))
    }
}

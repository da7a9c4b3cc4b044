//! Measures the cost of drift detection. Compares an idle fleet without drift checks to one with frequent checks, and
//! derives the cost of one check from the difference.

use std::time::Duration;

use anyhow::{Result, ensure};
use krypton_tests::{ChartRepository, Mode};

use crate::{
    krypton::{Rest, Setup, with_log},
    say,
    table::{fixed, table},
};

const HEADS: [&str; 4] = ["drift", "one check", "an hour", ""];
const NOTES: &str = "an hour: checks of one release at the default interval of 10 minutes. The release is the chart `small`: \
three objects\nwithout drift. Each check reads every object once.";
/// At the default interval of 10 minutes.
const LOOKS_AN_HOUR: f64 = 6.0;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Releases
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=300))]
    pub(crate) tenants: u32,
    /// Seconds at rest, with checks and without
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=3600))]
    pub(crate) seconds: u64,
    /// Seconds between two checks of one release
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(crate) interval: u64,
}

pub(crate) struct Measured {
    looks: f64,
    requests: f64,
    cpu_seconds: f64,
}

struct Resting {
    rest: Rest,
    cpu_seconds: f64,
}

impl Resting {
    /// Counts reads of Secrets. Each drift check reads the release's Secret once, and an idle reconciler reads no
    /// other.
    fn reads(&self) -> f64 {
        let key = ("GET".to_owned(), "secrets".to_owned());
        self.rest.edge.all.get(&key).copied().unwrap_or_default() as f64
    }
}

pub(crate) async fn measure(options: &Options, repository: &ChartRepository) -> Result<Measured> {
    let without = at_rest(options, "off", repository).await?;
    let with = at_rest(options, "warn", repository).await?;
    let requests = |resting: &Resting| resting.rest.edge.of_subject as f64;
    let looks = with.reads() - without.reads();
    ensure!(looks >= 1.0, "the agent performed no drift check");
    Ok(Measured {
        looks,
        requests: requests(&with) - requests(&without),
        cpu_seconds: with.cpu_seconds - without.cpu_seconds,
    })
}

async fn at_rest(options: &Options, drift: &str, repository: &ChartRepository) -> Result<Resting> {
    let size = options.tenants;
    say(&format!(
        "{size} Tenants, drift {drift}: starting home, edge, hub and agent"
    ));
    let interval = format!("--drift-interval={}s", options.interval);
    let flags = [format!("--drift={drift}"), interval];
    let setup = Setup::start(Mode::Agent, repository, &flags).await?;
    let resting = async {
        setup.install(0..size).await?;
        // After two intervals, the first drift check of each object is over.
        let first = Duration::from_secs(2 * options.interval);
        tokio::time::sleep(first).await;
        say(&format!("at rest for {} s", options.seconds));
        let before = setup.actor().cpu_seconds()?;
        let rest = setup.rest(Duration::from_secs(options.seconds)).await?;
        let cpu_seconds = setup.actor().cpu_seconds()? - before;
        Ok(Resting { rest, cpu_seconds })
    };
    resting
        .await
        .map_err(|error| with_log(error, setup.actor()))
}

pub(crate) fn render(measured: &Measured) -> String {
    let row = |name: &str, of_all: f64, digits: usize| {
        let one = of_all / measured.looks;
        let hour = one * LOOKS_AN_HOUR;
        [
            name.to_owned(),
            fixed(one, digits),
            fixed(hour, digits),
            String::new(),
        ]
    };
    let rows = [
        row("requests", measured.requests, 1),
        row("agent's CPU, ms", measured.cpu_seconds * 1000.0, 2),
    ];
    let looks = measured.looks;
    format!("{}\n{NOTES}\n{looks} looks.", table(HEADS, &rows))
}

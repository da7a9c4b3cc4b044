//! Runs `make bench`: concurrent Tenants on one edge cluster compared to plain Helm, and a thousand idle Tenants. Then
//! a thousand agents on one hub, agents on a flooded hub, and the time until banned members lose their session.

#[path = "../bench/arrivals.rs"]
mod arrivals;
#[path = "../bench/cut.rs"]
mod cut;
#[path = "../bench/drift.rs"]
mod drift;
#[path = "../bench/fan_out.rs"]
mod fan_out;
#[path = "../bench/fan_out_report.rs"]
mod fan_out_report;
#[path = "../bench/flood.rs"]
mod flood;
#[path = "../bench/floor.rs"]
mod floor;
#[path = "../bench/histogram.rs"]
mod histogram;
#[path = "../bench/home.rs"]
mod home;
#[path = "../bench/krypton.rs"]
mod krypton;
#[path = "../bench/machine.rs"]
mod machine;
#[path = "../bench/raw_agent.rs"]
mod raw_agent;
#[path = "../bench/report.rs"]
mod report;
#[path = "../bench/reports.rs"]
mod reports;
#[path = "../bench/rest.rs"]
mod rest;
#[path = "../bench/simulated.rs"]
mod simulated;
#[path = "../bench/stage.rs"]
mod stage;
#[path = "../bench/table.rs"]
mod table;
#[path = "../bench/traffic.rs"]
mod traffic;

use std::{future::Future, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use krypton_runtime::off_thread;
use krypton_tests::{ChartRepository, ChartSource, Mode, load, program::run_until_stopped};

/// Interval between drift checks of one release, much shorter than in production.
const DRIFT_INTERVAL: &str = "10s";
/// Number of concurrent Helm processes of the hub and of the floor.
const HELM_CONCURRENCY: u32 = 4;
const CHART: &str = "small";
const CHART_VERSION: &str = "1.0.0";
const SIZES: [u32; 2] = [30, 300];
/// Time to start and stop control planes and to wait for quiet, for one size.
const OVERHEAD: Duration = Duration::from_secs(600);

/// Measures Krypton's cost and speed. Without a command, runs all benchmarks
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Args {
    #[command(subcommand)]
    benchmark: Option<Benchmark>,
}

#[derive(Debug, Subcommand)]
enum Benchmark {
    /// Measure concurrent Tenants on one edge cluster, compared to plain Helm
    Edge(EdgeOptions),
    /// Measure an idle agent with many Tenants
    Rest(rest::Options),
    /// Measure an agent's drift checks
    Drift(drift::Options),
    /// Measure many simulated agents on one hub
    FanOut(fan_out::Options),
    /// Measure other agents while some flood the hub
    Flood(flood::Options),
    /// Measure how many Tenant reports one hub processes, and its writes
    Reports(reports::Options),
    /// Measure the CPU time of the hub's decisions after one member's change
    Home(home::Options),
    /// Measure how fast the sessions of banned or deleted members end
    Cut(cut::Options),
}

#[derive(Debug, clap::Args)]
struct EdgeOptions {
    /// Number of Tenants to create concurrently. By default 30, then 300
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    tenants: Option<u32>,
    /// Seconds of idling for the hub, for the agent, and without both. 0 skips it
    #[arg(long, value_name = "SECONDS", default_value_t = 120,
        value_parser = clap::value_parser!(u64).range(0..=3600))]
    idle: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    run_until_stopped("bench", Box::pin(measure_all(Args::parse()))).await
}

async fn measure_all(args: Args) -> Result<()> {
    println!("{}", machine::describe().await?);
    if let Some(benchmark) = args.benchmark {
        return Box::pin(measure(benchmark)).await;
    }
    for command in Args::command().get_subcommands() {
        let args = Args::try_parse_from(["bench", command.get_name()])?;
        let benchmark = args.benchmark.context("a command without a benchmark")?;
        Box::pin(measure(benchmark)).await?;
    }
    Ok(())
}

async fn measure(benchmark: Benchmark) -> Result<()> {
    match benchmark {
        Benchmark::Edge(options) => measure_edge(&options).await,
        Benchmark::Rest(options) => measure_rest(&options).await,
        Benchmark::Drift(options) => Box::pin(measure_drift(&options)).await,
        Benchmark::FanOut(options) => measure_fan_out(&options).await,
        Benchmark::Flood(options) => measure_flood(&options).await,
        Benchmark::Reports(options) => measure_reports(&options).await,
        Benchmark::Home(options) => measure_home(options).await,
        Benchmark::Cut(options) => measure_cut(&options).await,
    }
}

async fn measure_edge(options: &EdgeOptions) -> Result<()> {
    let repository = small_chart().await?;
    let sizes = options
        .tenants
        .map_or_else(|| SIZES.to_vec(), |size| vec![size]);
    for size in sizes {
        let limit = OVERHEAD + Duration::from_secs(3 * options.idle) + 5 * install_timeout(size);
        let what = format!("{size} Tenants");
        let measuring = measure_size(options, size, &repository);
        let measured = with_time_limit(&what, limit, measuring).await?;
        println!("{}", report::render(&measured));
    }
    Ok(())
}

async fn measure_rest(options: &rest::Options) -> Result<()> {
    let repository = small_chart().await?;
    let limit =
        OVERHEAD + Duration::from_secs(options.seconds) + 2 * install_timeout(options.tenants);
    let measured = with_time_limit("rest", limit, rest::measure(options, &repository)).await?;
    println!("{}", rest::render(&measured));
    Ok(())
}

async fn measure_drift(options: &drift::Options) -> Result<()> {
    let repository = small_chart().await?;
    let limit =
        OVERHEAD + Duration::from_secs(2 * options.seconds) + 2 * install_timeout(options.tenants);
    let measured = with_time_limit("drift", limit, drift::measure(options, &repository)).await?;
    println!("{}", drift::render(&measured));
    Ok(())
}

async fn measure_fan_out(options: &fan_out::Options) -> Result<()> {
    let limit = OVERHEAD + Duration::from_secs(options.idle + 60 * u64::from(options.rounds));
    let measured = with_time_limit("fan-out", limit, fan_out::measure(options)).await?;
    println!("{}", fan_out_report::render(&measured));
    Ok(())
}

async fn measure_flood(options: &flood::Options) -> Result<()> {
    let seconds = 8 * u64::from(options.rounds) * (options.seconds + 10);
    let limit = OVERHEAD + Duration::from_secs(seconds);
    let measured = with_time_limit("flood", limit, flood::measure(options)).await?;
    println!("{}", flood::render(&measured));
    Ok(())
}

async fn measure_reports(options: &reports::Options) -> Result<()> {
    let limit = OVERHEAD + Duration::from_secs(options.seconds);
    let measured = with_time_limit("reports", limit, reports::measure(options)).await?;
    println!("{}", reports::render(&measured));
    Ok(())
}

async fn measure_home(options: home::Options) -> Result<()> {
    let measuring = off_thread::start(move || home::measure(&options));
    let measured = with_time_limit("home", OVERHEAD, async { measuring.await? }).await?;
    println!("{measured}");
    Ok(())
}

async fn measure_cut(options: &cut::Options) -> Result<()> {
    let measured = with_time_limit("cut", OVERHEAD, cut::measure(options)).await?;
    println!("{}", cut::render(&measured));
    Ok(())
}

async fn small_chart() -> Result<ChartRepository> {
    ChartRepository::start(&[ChartSource::small(CHART_VERSION)]).await
}

async fn with_time_limit<T>(
    what: &str,
    limit: Duration,
    measuring: impl Future<Output = Result<T>>,
) -> Result<T> {
    let measured = tokio::time::timeout(limit, Box::pin(measuring)).await;
    measured.with_context(|| format!("{what}: not done in {limit:?}"))?
}

/// Measures one case after the other, each on new control planes.
async fn measure_size(
    args: &EdgeOptions,
    size: u32,
    repository: &ChartRepository,
) -> Result<report::EdgeResults> {
    let idle = Duration::from_secs(args.idle);
    let hub = Box::pin(krypton::measure(size, Mode::Proxy, idle, repository, &[])).await?;
    let agent = Box::pin(krypton::measure(size, Mode::Agent, idle, repository, &[])).await?;
    let drift_flags = [
        "--drift=heal".to_owned(),
        format!("--drift-interval={DRIFT_INTERVAL}"),
    ];
    let drift = Box::pin(krypton::measure(
        size,
        Mode::Agent,
        Duration::ZERO,
        repository,
        &drift_flags,
    ))
    .await?;
    let plain = Box::pin(floor::measure(size, floor::Flags::Plain, repository)).await?;
    let same_flags = Box::pin(floor::measure(size, floor::Flags::Hubs, repository)).await?;
    Ok(report::EdgeResults {
        size,
        idle,
        hub,
        agent,
        drift,
        plain,
        same_flags,
    })
}

/// Returns the time after which `size` installations count as stuck.
fn install_timeout(size: u32) -> Duration {
    Duration::from_secs(120) + Duration::from_secs(3) * size
}

/// Returns `bench-007`, the name of the Tenant and of its namespace.
fn name(number: u32) -> String {
    format!("bench-{number:03}")
}

fn log_progress(progress: &str) {
    eprintln!("bench: {progress}");
}

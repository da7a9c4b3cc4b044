//! Measures how many reports one hub processes, at which cost, and how many Tenant writes on the home cluster follow.
//! Agents continuously report changes of all their Tenants, and the home cluster has all of these Tenants too.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_hub::members::tenant_reports::{ReportState, TenantReportChanges, TenantReports};
use krypton_tests::eventually_within;
use krypton_types::{
    conditions::{State, Truth, reason},
    tenant::TenantReport,
};

use anyhow::{Context, Result, bail};
use kube::{Api, api::PostParams};

use crate::{
    krypton::SETTLE,
    load::CpuTimes,
    log_progress,
    machine::OtherLoad,
    simulated::{Agents, DEADLINE, installed_report, tenant_key},
    stage::{Stage, number},
    table::{fixed, table},
    traffic::Traffic,
};

const REPORTS: &str = "krypton_hub_tenant_reports_total";
const THROTTLED: &str = "krypton_hub_sessions_throttled_total";
const TARGET: f64 = 20_000.0;
/// Interval at which each agent changes all its Tenants. The resulting rate far exceeds the hub's target rate.
const CHANGE_INTERVAL: Duration = Duration::from_millis(250);
/// Duration of the measurement in the first row.
const STORE_DURATION: Duration = Duration::from_secs(3);
const NOTES: &str = "\
The first row is the report store without sessions: one thread, with one message for all Tenants and the
digest of each report. The others are a hub process with agents over mutual TLS. The agents use part of
the same cores. Half of the Tenants alternate between ready and not ready, which causes writes on home.
";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Simulated agents
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) agents: u32,
    /// Tenants that each agent reports, and that home has too
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tenants: u32,
    /// Seconds of reporting
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) seconds: u64,
}

#[derive(Debug)]
pub(crate) struct ReportResults {
    options: Options,
    /// Reports per second that the report store alone processes.
    store_alone: f64,
    seconds: f64,
    processed: u64,
    throttled: u64,
    /// Status writes of the Tenants on the home cluster.
    writes: u64,
    /// Time until the home cluster shows the last reports.
    shown: Duration,
    hub: f64,
    other_cores: f64,
}

/// Returns a report that differs in each round. For odd Tenants, every third report is not ready. Agents send only the
/// latest report. If it were every second one, the hub could always observe the same state.
fn report(round: u64, number: u32) -> TenantReport {
    let mut report = installed_report();
    report.observed_generation = i64::try_from(round).unwrap_or(i64::MAX);
    if number % 2 == 1 && round % 3 == 1 {
        report.state.ready = State::new(Truth::False, reason::UPGRADING, "on its way");
    }
    report
}

pub(crate) async fn measure(options: &Options) -> Result<ReportResults> {
    let store_alone = store_alone(options);
    log_progress(&format!(
        "reports: the store alone processes {store_alone:.0} a second"
    ));
    let stage = Stage::start("reports", options.agents).await?;
    let members = stage.create_members("simulated", options.agents).await?;
    let tenants: Api<Tenant> = Api::namespaced(stage.home.client(), "default");
    for number in 0..options.tenants {
        let tenant = Tenant::new(&crate::name(number), TenantSpec::default());
        tenants.create(&PostParams::default(), &tenant).await?;
    }
    let agents = Agents::start_and_wait(stage.enroll(&members).await?).await?;
    agents.report_tenants(options.tenants);
    wait_until_shown(&tenants, options).await?;
    tokio::time::sleep(SETTLE).await;

    log_progress(&format!(
        "reports: {} agents report for {} s",
        options.agents, options.seconds
    ));
    let (clock, other_load) = (
        Instant::now(),
        OtherLoad::watch(stage.known_cpu_seconds()?)?,
    );
    let (metrics, cpu_before) = (
        stage.hub.metrics().await?,
        CpuTimes::read_for(stage.hub.pid())?,
    );
    let traffic = Traffic::read(&stage.home).await?;
    let mut round = 0;
    while clock.elapsed() < Duration::from_secs(options.seconds) {
        let next = Instant::now() + CHANGE_INTERVAL;
        round += 1;
        send_changes(&agents, options.tenants, round).await;
        tokio::time::sleep_until(next.into()).await;
    }
    let metrics_after = stage.hub.metrics().await?;
    let seconds = clock.elapsed().as_secs_f64();
    let hub = CpuTimes::read_for(stage.hub.pid())?
        .since(&cpu_before)
        .total();
    let other_cores = other_load.cores(stage.known_cpu_seconds()?)?;
    let traffic = Traffic::read(&stage.home).await?.since(&traffic);
    let patch_key = ("PATCH".to_owned(), "tenants".to_owned());
    let writes = traffic.all.get(&patch_key).copied().unwrap_or_default();
    let last_change = Instant::now();
    send_changes(&agents, options.tenants, 3 * round).await;
    wait_until_shown(&tenants, options).await?;
    let increase = |name: &str| -> Result<u64> {
        Ok(number(&metrics_after, name)? - number(&metrics, name).unwrap_or_default())
    };
    Ok(ReportResults {
        options: options.clone(),
        store_alone,
        seconds,
        processed: increase(REPORTS)?,
        throttled: increase(THROTTLED)?,
        writes,
        shown: last_change.elapsed(),
        hub,
        other_cores,
    })
}

async fn send_changes(agents: &Agents, tenants: u32, round: u64) {
    for agent in 0..agents.count() {
        for number in 0..tenants {
            agents.report(agent, &tenant_key(number), Some(report(round, number)));
        }
        tokio::task::yield_now().await;
    }
}

async fn wait_until_shown(tenants: &Api<Tenant>, options: &Options) -> Result<()> {
    let expected = format!("{0} of {0} clusters ready", options.agents);
    eventually_within("home to show the last report", DEADLINE, async || {
        let all = tenants.list(&Default::default()).await?;
        let shown = all.items.iter().filter(|tenant| {
            let status = tenant.status.as_ref();
            status.and_then(|status| status.last_message.as_deref()) == Some(expected.as_str())
        });
        let count = shown.count();
        if count < options.tenants as usize {
            bail!("only {count} of {} Tenants show it", options.tenants);
        }
        Ok(Some(()))
    })
    .await
    .context("home")
}

/// Reports per second that the report store processes in one thread.
fn store_alone(options: &Options) -> f64 {
    let reports = TenantReports::default();
    let names: Vec<String> = (0..options.agents)
        .map(|number| format!("simulated-{number:04}"))
        .collect();
    for name in &names {
        reports.set_report_state(name, ReportState::Complete);
    }
    let (clock, mut count, mut round) = (Instant::now(), 0_u64, 0);
    while clock.elapsed() < STORE_DURATION {
        round += 1;
        for name in &names {
            let changes: BTreeMap<_, _> = (0..options.tenants)
                .map(|number| (tenant_key(number), Some(report(round, number))))
                .collect();
            count += u64::from(options.tenants);
            reports.apply(name, TenantReportChanges::new(changes));
        }
    }
    count as f64 / clock.elapsed().as_secs_f64()
}

pub(crate) fn render(measured: &ReportResults) -> String {
    let per_second = |count: u64| count as f64 / measured.seconds;
    let target = |value: f64| {
        let met = if value >= TARGET { "met" } else { "missed" };
        format!(">= {TARGET}: {met}")
    };
    let row = |label: &str, value: f64, digits: usize, target: String| {
        [label.to_owned(), fixed(value, digits), target]
    };
    let processed = per_second(measured.processed);
    let writes = per_second(measured.writes);
    let max_writes = f64::from(measured.options.tenants);
    let writes_target = format!("<= {max_writes}, one for each Tenant");
    let rows = [
        row(
            "reports a second into the board alone",
            measured.store_alone,
            0,
            target(measured.store_alone),
        ),
        row(
            "reports a second into the hub",
            processed,
            0,
            target(processed),
        ),
        row(
            "sessions throttled, times a second",
            per_second(measured.throttled),
            1,
            String::new(),
        ),
        row(
            "writes of home's Tenants a second",
            writes,
            1,
            writes_target,
        ),
        row(
            "until home shows the last of them, s",
            measured.shown.as_secs_f64(),
            1,
            String::new(),
        ),
        row(
            "cores of the hub",
            measured.hub / measured.seconds,
            2,
            String::new(),
        ),
        row(
            "cores kept busy by others",
            measured.other_cores,
            2,
            String::new(),
        ),
    ];
    format!(
        "\n== {} agents with {} Tenants each report changes ==\n{}{NOTES}",
        measured.options.agents,
        measured.options.tenants,
        table(["figure", "is", "target"], &rows),
    )
}

//! Renders the results of the fan-out benchmark as a table of figures and targets.

use std::time::Duration;

use crate::{
    fan_out::{ChangeResults, ConnectResults, FanOutIdle, FanOutResults},
    load::Memory,
    table::{MIB, at_most, fixed, table},
};

/// CPU cores used by other processes. Above this limit, the measured times are unreliable.
const QUIET_CORES: f64 = 0.15;
const HEADERS: [&str; 3] = ["figure", "is", "target"];
const NOTES: &str = "\
Simulated agents are the agent's own dialer, session and report store, each with a certificate from
the hub's CA, over mutual TLS on loopback, all in this process. Only the cluster behind them is simulated.
Hub, agents, home's API server and etcd share the machine. Quantiles of the hub's clock are within
buckets that grow by half. Only the holder of the hub's Lease writes to home. After a kill, the Lease
expires after 60 s, and until then home shows the previous state.
";

/// Label, figure and target.
type Row = [String; 3];

pub(crate) fn render(measured: &FanOutResults) -> String {
    let FanOutResults {
        options,
        without_agents,
        connecting,
        connected,
        idle,
        rounds,
        filling,
        restart,
        resyncs,
    } = measured;
    let agents = f64::from(options.agents);
    let before = mib(without_agents.resident);
    let per_agent = 1024.0 * (mib(connected.resident) - before) / agents;
    let memory_label = "RSS of the hub, all idle, MiB";
    let mut rows = connect_rows("all connect concurrently", connecting, None);
    rows.extend(memory_rows(memory_label, connected, Some(100.0)));
    rows.push(figure("  before the first agent", before, 1));
    rows.push(figure("  for each agent, KiB", per_agent, 1));
    rows.extend(idle_rows(idle, options.idle));
    rows.extend(round_rows(rounds));
    let each = options.tenants_each;
    let label = format!("{each} Tenants each are reported: shown on home, s");
    rows.push(seconds(&label, filling.shown_on_home, None));
    rows.extend(memory_rows("  RSS of the hub, MiB", &filling.memory, None));
    let restarted = connect_rows("hub killed and started", &restart.connecting, Some(30.0));
    rows.extend(restarted);
    let resyncs = *resyncs as f64;
    rows.extend([
        seconds("  all confirmed again, s", restart.confirmed, Some(60.0)),
        figure("  RSS of the hub, MiB", mib(restart.memory.resident), 1),
        figure("full reports that the hub requested again", resyncs, 0),
    ]);
    let loads = [
        ("idle", idle.other_cores),
        ("changes", rounds.other_cores),
        ("restart", restart.other_cores),
    ];
    let load_texts = loads.map(|(label, cores)| format!("{label} {cores:.2}"));
    let mut text = format!(
        "\n== {} simulated agents on one hub ==\n{}{NOTES}Cores used by other processes: {}.\n",
        options.agents,
        table(HEADERS, &rows),
        load_texts.join(", "),
    );
    if loads.iter().any(|(_, cores)| *cores > QUIET_CORES) {
        text += "NOT A QUIET MACHINE: times are disturbed; counts and memory are not.\n";
    }
    text
}

fn connect_rows(label: &str, results: &ConnectResults, target: Option<f64>) -> Vec<Row> {
    let per_second = results.max_per_second as f64;
    let handshakes = "  most TLS handshakes at a time";
    vec![
        seconds(&format!("{label}: first session, s"), results.first, None),
        seconds("  all sessions, s", results.last, target),
        figure("  most of them within a second", per_second, 0),
        row(handshakes, results.handshakes as f64, 0, Some(200.0)),
        figure("  CPU of the hub until then, s", results.hub.total(), 2),
        seconds("  all shown on home, s", results.shown_on_home, None),
    ]
}

fn memory_rows(label: &str, memory: &Memory, target: Option<f64>) -> Vec<Row> {
    let anonymous = "    anonymous memory, without files";
    vec![
        row(label, mib(memory.resident), 1, target),
        figure(anonymous, mib(memory.anonymous), 1),
        figure("    peak", mib(memory.peak), 1),
    ]
}

fn idle_rows(idle: &FanOutIdle, span: u64) -> Vec<Row> {
    let minutes = span as f64 / 60.0;
    let requests = idle.home.own_requests as f64 / minutes;
    let writes = idle.status_writes() as f64 / minutes;
    let cpu_label = "CPU of the hub, all idle, milli-cores";
    vec![
        row(cpu_label, idle.hub, 1, Some(60.0)),
        figure("  kernel part", idle.kernel, 1),
        figure("  median of parts of 5 s", idle.median, 1),
        figure("  requests to home a minute", requests, 1),
        figure("  writes of EdgeClusters", writes, 1),
        figure("  CPU of all agents, milli-cores", idle.agents, 1),
    ]
}

fn round_rows(rounds: &ChangeResults) -> Vec<Row> {
    let millis = |seconds: f64| 1000.0 * seconds;
    let worst = |index: usize| {
        let times = rounds.by_agents.iter().filter_map(|times| times.get(index));
        millis(times.max().copied().unwrap_or_default().as_secs_f64())
    };
    let shown_on_home = rounds.shown_on_home.iter().max();
    let shown_on_home = shown_on_home.copied().unwrap_or_default();
    let changes = rounds.by_hub.count();
    let label = format!("a change is in all slots, p50 of {changes}, ms");
    let [p50, p99] = [0.5, 0.99].map(|share| millis(rounds.by_hub.quantile(share)));
    let agents_label = "  agents' clock, after the first agent: p50, ms";
    vec![
        figure(&label, p50, 0),
        row("  p99, ms", p99, 0, Some(300.0)),
        figure(agents_label, worst(0), 0),
        figure("    p99, ms (the worst of the changes)", worst(1), 0),
        figure("    the last, ms", worst(2), 0),
        seconds("  shown on home, s", shown_on_home, None),
        figure("  CPU of the hub until then, s", rounds.hub.total(), 2),
    ]
}

fn row(label: &str, value: f64, digits: usize, target: Option<f64>) -> Row {
    let target = target.map(|target| at_most(target, value));
    let (label, target) = (label.to_owned(), target.unwrap_or_default());
    [label, fixed(value, digits), target]
}

fn figure(label: &str, value: f64, digits: usize) -> Row {
    row(label, value, digits, None)
}

fn seconds(label: &str, value: Duration, target: Option<f64>) -> Row {
    row(label, value.as_secs_f64(), 2, target)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

//! Renders the results for one number of Tenants: figures, floors, targets and the requests by resource.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    floor::FloorResults,
    krypton::{IdleComparison, IdleUsage, InstallCost, KryptonResults},
    table::{MIB, fixed, table, verdict},
    traffic::Counts,
};

/// CPU cores used by other processes. Above this limit, the measured times are unreliable.
const QUIET_CORES: f64 = 0.15;
/// The number of Tenants to which the target for requests applies.
const REQUESTS_SIZE: u32 = 30;
const HEADERS: [&str; 8] = [
    "figure",
    "hub",
    "agent",
    "helm alone",
    "ratios",
    "our flags",
    "ratios",
    "target",
];
/// Maximum number of rows of a breakdown. The last row sums up the rest.
const MAX_ROWS: usize = 28;
const NOTES: &str = "\
Hub: a hub installs through the edge cluster's kubeconfig. Agent: an agent of the edge cluster installs,
connected to a hub whose CPU and memory are not included. Both are compared to both floors, in this order.
Floors: xargs -P4 helm upgrade --install --wait=hookOnly, with namespaces created before the clock
starts; alone, and with our flags (no OpenAPI validation, --qps 50 and so on).
CPU and requests are counted until 5 s after the last installation. Our requests and helm's are counted by
user, a watch at its start. All requests include requests from controllers, scheduler, node, API server and
this benchmark, a watch at its end. The API server doesn't count /version and /metrics there. The unit of
CPU time is 10 ms.
";

/// All measurements for one number of Tenants.
#[derive(Debug)]
pub(crate) struct EdgeResults {
    pub(crate) size: u32,
    pub(crate) idle: Duration,
    pub(crate) hub: KryptonResults,
    pub(crate) agent: KryptonResults,
    /// An agent that continuously checks for drift.
    pub(crate) drift: KryptonResults,
    pub(crate) plain: FloorResults,
    pub(crate) same_flags: FloorResults,
}

/// Label, hub, agent, floor, ratios, floor, ratios, target.
type Row = [String; 8];

/// Figures of the hub, of the agent, and of both floors.
type Figures = [f64; 4];

impl EdgeResults {
    fn concurrent(&self) -> [&InstallCost; 4] {
        [
            &self.hub.concurrent,
            &self.agent.concurrent,
            &self.plain.concurrent,
            &self.same_flags.concurrent,
        ]
    }

    fn single(&self) -> [&InstallCost; 4] {
        [
            &self.hub.single,
            &self.agent.single,
            &self.plain.single,
            &self.same_flags.single,
        ]
    }

    fn krypton(&self) -> [&KryptonResults; 2] {
        [&self.hub, &self.agent]
    }

    fn idle(&self) -> Option<[&IdleComparison; 2]> {
        Some([self.hub.idle.as_ref()?, self.agent.idle.as_ref()?])
    }
}

pub(crate) fn render(measured: &EdgeResults) -> String {
    let EdgeResults {
        size, idle: span, ..
    } = measured;
    let mut rows = install_rows(measured);
    if let Some(idle) = measured.idle() {
        rows.extend(idle_rows(idle, *span));
    }
    let heads = ["hub", "agent", "alone", "flags"];
    let concurrent = measured.concurrent().map(|work| &work.edge.all);
    let single = measured.single().map(|work| &work.edge.all);
    let mut text = format!(
        "\n== {size} concurrent Tenants on one edge ==\n{}{}{NOTES}{}\
         \nall requests to the edge for {size} Tenants\n{}\
         \nall requests to the edge for one more Tenant, alone and with warm caches\n{}",
        table(HEADERS, &rows),
        with_drift(measured),
        load_summary(measured),
        breakdown(&heads, &concurrent, *size),
        breakdown(&heads, &single, 1),
    );
    if let Some([hub, agent]) = measured.idle() {
        let no_requests = Counts::default();
        let without = hub
            .without
            .as_ref()
            .map_or(&no_requests, |rest| &rest.edge.all);
        let rest = [&hub.with.edge.all, &agent.with.edge.all, without];
        text += &format!(
            "\nall requests to the edge while idle for {} s\n{}",
            span.as_secs(),
            breakdown(&["hub", "agent", "none"], &rest, 1),
        );
    }
    text
}

/// Returns the seconds until all Tenants are installed and Helm has ended.
fn end(work: &InstallCost) -> f64 {
    let last = work.arrivals.last.max(work.helm_ended.unwrap_or_default());
    last.as_secs_f64()
}

/// Renders the figures of an agent that also checks for drift.
fn with_drift(measured: &EdgeResults) -> String {
    let drift = &measured.drift.concurrent;
    let floors = [&measured.plain.concurrent, &measured.same_flags.concurrent];
    let [plain, flags] = floors.map(|floor| end(drift) / end(floor));
    format!(
        "The agent with drift looked for every few seconds: all Ready after {} s, {} and {} times the floors \
         (<= 1.2: {}); CPU with helm's {} s; RSS {} MiB, its peak {}.\n",
        fixed(end(drift), 2),
        fixed(plain, 2),
        fixed(flags, 2),
        verdict(1.2, plain.max(flags)),
        fixed(drift.cpu_seconds, 2),
        fixed(measured.drift.memory.resident as f64 / MIB, 1),
        fixed(measured.drift.memory.peak as f64 / MIB, 1),
    )
}

fn install_rows(measured: &EdgeResults) -> Vec<Row> {
    let size = measured.size;
    let (concurrent, single) = (measured.concurrent(), measured.single());
    let first = concurrent.map(|work| work.arrivals.first.as_secs_f64());
    let all = concurrent.map(end);
    let cpu = concurrent.map(|work| work.cpu_seconds);
    let requests = concurrent.map(|work| work.edge.total() as f64);
    let per_tenant = requests.map(|requests| requests / f64::from(size));
    let own_requests = |work: &InstallCost| work.edge.own_requests as f64;
    let single_cpu = single.map(|work| work.cpu_seconds);
    let helm_ended = |work: &InstallCost| work.helm_ended.unwrap_or_default();
    let krypton = |figure: &dyn Fn(&KryptonResults) -> f64| measured.krypton().map(figure);
    let own_cpu = krypton(&|krypton| krypton.concurrent.own_cpu_seconds);
    let to_home = krypton(&|krypton| krypton.home.own_requests as f64);
    let resident = krypton(&|krypton| krypton.memory.resident as f64 / MIB);
    let peak = krypton(&|krypton| krypton.memory.peak as f64 / MIB);
    let first_target = at_most_each(1.5, [first[0], first[1]]);
    let requests_target = match size {
        REQUESTS_SIZE => at_most_each(1400.0, [requests[0], requests[1]]),
        _ => String::new(),
    };
    vec![
        row("first Ready (floors: available), s", first, 2).with(first_target),
        row("all Ready (floors: helm and pods), s", all, 2).with(ratios_at_most(1.2, all)),
        floor_row("  helm ended, s", measured, helm_ended),
        floor_row("  Deployments available, s", measured, |work| {
            work.arrivals.last
        }),
        row("CPU with helm's, s", cpu, 2).with(ratios_at_most(1.15, cpu)),
        process_row("  the process itself", own_cpu, 2),
        row("requests to the edge, of all clients", requests, 0).with(requests_target),
        row("  for each Tenant", per_tenant, 1),
        row("  our own and helm's", concurrent.map(own_requests), 0),
        process_row("requests of the hub to home", to_home, 0),
        process_row("RSS, MiB", resident, 1),
        process_row("  its peak", peak, 1),
        row("one more Tenant: Ready, s", single.map(end), 2),
        row("  CPU with helm's, s", single_cpu, 2),
        row("  our own requests and helm's", single.map(own_requests), 0),
    ]
}

fn idle_rows(idle: [&IdleComparison; 2], span: Duration) -> Vec<Row> {
    let minutes = span.as_secs_f64() / 60.0;
    let cpu = idle.map(|idle| 100.0 * idle.with.cpu_seconds / span.as_secs_f64());
    let per_minute =
        |count: &dyn Fn(&IdleUsage) -> u64| idle.map(|idle| count(&idle.with) as f64 / minutes);
    let own_to_edge = per_minute(&|rest| rest.edge.own_requests);
    let all_to_edge = per_minute(&|rest| rest.edge.total());
    let own_to_home = per_minute(&|rest| rest.home.own_requests);
    let all_to_home = per_minute(&|rest| rest.home.total());
    let rss = idle.map(|idle| idle.memory.resident as f64 / MIB);
    let anonymous = idle.map(|idle| idle.memory.anonymous as f64 / MIB);
    let own_label = "idle: requests a minute, our own to the edge";
    let rss_target = format!("agent <= 15: {}", verdict(15.0, rss[1]));
    let mut rows = vec![
        process_row("idle: CPU, % of a core", cpu, 3).with(at_most_each(0.05, cpu)),
        process_row(own_label, own_to_edge, 1).with(at_most_each(8.0, own_to_edge)),
        process_row("  all clients to the edge", all_to_edge, 1),
        process_row("  the hub to home", own_to_home, 1),
        process_row("  all clients to home", all_to_home, 1),
        process_row("idle: RSS, MiB", rss, 1).with(rss_target),
        process_row("  anonymous memory, without files", anonymous, 1),
    ];
    if let Some(without) = &idle[0].without {
        for (at, rest) in [("edge", &without.edge), ("home", &without.home)] {
            let mut quiet = Row::default();
            quiet[0] = format!("without Krypton: all requests a minute to {at}");
            quiet[3] = fixed(rest.total() as f64 / minutes, 1);
            rows.push(quiet);
        }
    }
    rows
}

fn load_summary(measured: &EdgeResults) -> String {
    let heads = ["hub", "agent", "helm alone", "our flags"];
    let concurrent = measured.concurrent().map(|work| work.other_cores);
    let heads_owned = heads.map(str::to_owned).into_iter();
    let mut loads: Vec<(String, f64)> = heads_owned.zip(concurrent).collect();
    for (actor, idle) in heads.iter().zip(measured.idle().into_iter().flatten()) {
        loads.push((format!("{actor} idle"), idle.with.other_cores));
    }
    let load_texts: Vec<_> = loads
        .iter()
        .map(|(label, cores)| format!("{label} {cores:.2}"))
        .collect();
    let load_texts = load_texts.join(", ");
    let mut text = format!("Cores used by other processes: {load_texts}.\n");
    if loads.iter().any(|(_, cores)| *cores > QUIET_CORES) {
        text += "NOT A QUIET MACHINE: times and their ratios are disturbed; counts are not.\n";
    }
    text
}

/// Adds the target to a row.
trait WithTarget {
    fn with(self, target: String) -> Self;
}

impl WithTarget for Row {
    fn with(mut self, target: String) -> Self {
        self[7] = target;
        self
    }
}

fn row(label: &str, figures: Figures, digits: usize) -> Row {
    let [hub, agent, ..] = figures;
    let ratios = |floor: f64| {
        if floor > 0.0 {
            format!("{} {}", fixed(hub / floor, 2), fixed(agent / floor, 2))
        } else {
            String::new()
        }
    };
    let (plain, flags) = (ratios(figures[2]), ratios(figures[3]));
    let [hub, agent, floor, with_flags] = figures.map(|figure| fixed(figure, digits));
    let (label, target) = (label.to_owned(), String::new());
    [label, hub, agent, floor, plain, with_flags, flags, target]
}

/// Returns a row without floors.
fn process_row(label: &str, value: [f64; 2], digits: usize) -> Row {
    let mut row = Row::default();
    row[0] = label.to_owned();
    [row[1], row[2]] = value.map(|value| fixed(value, digits));
    row
}

/// Returns a row with floors only.
fn floor_row(label: &str, measured: &EdgeResults, time: impl Fn(&InstallCost) -> Duration) -> Row {
    let mut row = Row::default();
    row[0] = label.to_owned();
    [row[3], row[5]] = [&measured.plain, &measured.same_flags]
        .map(|floor| fixed(time(&floor.concurrent).as_secs_f64(), 2));
    row
}

/// Compares the hub and the agent to the target.
fn at_most_each(target: f64, value: [f64; 2]) -> String {
    let [hub, agent] = value.map(|value| verdict(target, value));
    format!("<= {target}: {hub}, {agent}")
}

/// Compares hub and agent to both floors.
fn ratios_at_most(target: f64, [hub, agent, plain, flags]: Figures) -> String {
    let [hub, agent] = [hub, agent].map(|value| {
        let [plain, flags] = [plain, flags].map(|floor| verdict(target, value / floor));
        format!("{plain} {flags}")
    });
    format!("ratio <= {target}: {hub}, {agent}")
}

/// Returns the requests by verb and resource, the most frequent first. The last column is the difference between the
/// first and the last column for each Tenant.
fn breakdown(heads: &[&str], columns: &[&Counts], tenants: u32) -> String {
    let keys: BTreeSet<_> = columns.iter().flat_map(|counts| counts.keys()).collect();
    let at = |key| -> Vec<u64> {
        columns
            .iter()
            .map(|counts| counts.get(key).copied().unwrap_or_default())
            .collect()
    };
    let mut rows: Vec<_> = keys.into_iter().map(|key| (key, at(key))).collect();
    rows.sort_by_key(|(key, counts)| (std::cmp::Reverse(counts.iter().max().copied()), *key));
    let line = |label: &str, counts: &[u64]| {
        let [first, .., last] = counts else {
            return String::new();
        };
        let difference = (*first as f64 - *last as f64) / f64::from(tenants);
        let counts: String = counts.iter().map(|count| format!("{count:>9}")).collect();
        format!("{counts} {difference:>+8.1}  {label}\n")
    };
    let heads: String = heads.iter().map(|head| format!("{head:>9}")).collect();
    let mut text = format!("{heads} {:>8}\n", "more");
    for ((verb, resource), counts) in rows.iter().take(MAX_ROWS) {
        // Paths without a resource: discovery, OpenAPI, version.
        let resource = if resource.is_empty() {
            "(discovery and others)"
        } else {
            resource
        };
        text += &line(&format!("{verb} {resource}"), counts);
    }
    let sum = |rows: &[(_, Vec<u64>)]| -> Vec<u64> {
        let column = |column: usize| {
            rows.iter()
                .filter_map(|(_, counts)| counts.get(column))
                .sum()
        };
        (0..columns.len()).map(column).collect()
    };
    if let Some(rest) = rows.get(MAX_ROWS..).filter(|rest| !rest.is_empty()) {
        text += &line("others", &sum(rest));
    }
    text + &line("all", &sum(&rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(all: &[(&str, &str, u64)]) -> Counts {
        all.iter()
            .map(|(verb, resource, n)| (((*verb).to_owned(), (*resource).to_owned()), *n))
            .collect()
    }

    #[test]
    fn figure_has_ratios_and_verdicts_per_floor() {
        let times = [6.0, 4.8, 5.0, 4.0];
        let row = row("all Ready, s", times, 2).with(ratios_at_most(1.2, times));
        let expected = [
            "all Ready, s",
            "6.00",
            "4.80",
            "5.00",
            "1.20 0.96",
            "4.00",
            "1.50 1.20",
            "ratio <= 1.2: met missed, met met",
        ];
        assert_eq!(row, expected);
    }

    #[test]
    fn figure_without_floors_has_hub_and_agent_verdicts() {
        let value = [0.06, 0.05];
        let row = process_row("idle", value, 3).with(at_most_each(0.05, value));
        let target = "<= 0.05: missed, met";
        assert_eq!(row, ["idle", "0.060", "0.050", "", "", "", "", target]);
    }

    #[test]
    fn missing_floor_has_no_ratio() {
        let row = row("nothing", [1.0, 2.0, 0.0, 2.0], 0);
        assert_eq!(row, ["nothing", "1", "2", "0", "", "2", "0.50 1.00", ""]);
    }

    #[test]
    fn breakdown_sorts_by_cost_and_ends_with_sum() {
        let our_counts = counts(&[("GET", "secrets", 60), ("PATCH", "tenants", 90)]);
        let others = counts(&[("GET", "secrets", 30), ("GET", "", 5)]);
        let rendered = breakdown(&["ours", "others"], &[&our_counts, &others], 30);
        let lines: Vec<_> = rendered
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .collect();
        assert_eq!(lines[0], ["ours", "others", "more"]);
        assert_eq!(lines[1], ["90", "0", "+3.0", "PATCH", "tenants"]);
        assert_eq!(lines[2], ["60", "30", "+1.0", "GET", "secrets"]);
        assert_eq!(
            lines[3],
            ["0", "5", "-0.2", "GET", "(discovery", "and", "others)"]
        );
        assert_eq!(lines[4], ["150", "35", "+3.8", "all"]);
    }
}

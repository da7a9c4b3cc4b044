//! The table of one size: figures beside the floors' and the targets, and where requests went.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    floor::Floor,
    krypton::{Idle, Krypton, Work},
    table::{MIB, at_most, fixed, table, verdict},
    traffic::Counts,
};

/// Others' work beyond this makes times of little worth.
const QUIET_CORES: f64 = 0.15;
/// The number of Tenants that the target for requests was set for.
const REQUESTS_SIZE: u32 = 30;
const HEADS: [&str; 7] = [
    "figure",
    "krypton",
    "helm alone",
    "ratio",
    "hub's flags",
    "ratio",
    "target",
];
/// Rows of a breakdown; the rest is summed up.
const SHOWN: usize = 28;
const NOTES: &str = "\
Floors: xargs -P4 helm upgrade --install --wait=hookOnly, its namespaces made before the clock
starts; alone, and with the flags the hub gives (no OpenAPI validation, --qps 50 and so on).
CPU and requests are until 5 s after the last one. Requests of the hub and helm are those of their
user, a watch counted when it begins. Everybody's are of controllers, scheduler, node, apiserver and
this benchmark too, a watch counted when it ends; the apiserver counts no /version and /metrics
there. CPU is counted in ticks of 10 ms.
";

/// All of one size.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) size: u32,
    pub(crate) idle: Duration,
    pub(crate) krypton: Krypton,
    pub(crate) plain: Floor,
    pub(crate) same_flags: Floor,
}

/// Label, krypton, floor, ratio, floor, ratio, target.
type Row = [String; 7];

pub(crate) fn render(measured: &Measured) -> String {
    let Measured {
        size,
        idle: span,
        krypton,
        plain,
        same_flags,
    } = measured;
    let mut rows = work(measured);
    if let Some(idle) = &krypton.idle {
        rows.extend(idle_rows(idle, *span));
    }
    let heads = ["krypton", "alone", "flags"];
    let many = [&krypton.many, &plain.many, &same_flags.many].map(|work| &work.edge.all);
    let single = [&krypton.single, &plain.single, &same_flags.single].map(|work| &work.edge.all);
    let mut out = format!(
        "\n== {size} Tenants at once on one edge ==\n{}{NOTES}{}\
         \nrequests to the edge for {size} Tenants, everybody's\n{}\
         \nrequests to the edge for one more Tenant, alone and with warm caches, everybody's\n{}",
        table(HEADS, &rows),
        noise(measured),
        breakdown(&heads, &many, *size),
        breakdown(&heads, &single, 1),
    );
    if let Some(idle) = &krypton.idle {
        let rest = [&idle.with_hub.edge.all, &idle.without_hub.edge.all];
        out += &format!(
            "\nrequests to the edge while idle for {} s, everybody's\n{}",
            span.as_secs(),
            breakdown(&["hub", "no hub"], &rest, 1),
        );
    }
    out
}

fn work(measured: &Measured) -> Vec<Row> {
    let Measured {
        size,
        krypton,
        plain,
        same_flags,
        ..
    } = measured;
    let many = [&krypton.many, &plain.many, &same_flags.many];
    let single = [&krypton.single, &plain.single, &same_flags.single];
    let seconds = |time: Duration| time.as_secs_f64();
    let end = |work: &Work| seconds(work.arrivals.last.max(work.helm_ended.unwrap_or_default()));
    let first = many.map(|work| seconds(work.arrivals.first));
    let all = many.map(end);
    let cpu = many.map(|work| work.cpu_seconds);
    let requests = many.map(|work| work.edge.total() as f64);
    let of_subject = |work: &Work| work.edge.of_subject as f64;
    let ended = |work: &Work| fixed(seconds(work.helm_ended.unwrap_or_default()), 2);
    let available = |work: &Work| fixed(seconds(work.arrivals.last), 2);
    let floors = |label: &str, figure: &dyn Fn(&Work) -> String| {
        let none = String::new;
        let [plain, flags] = [&plain.many, &same_flags.many].map(figure);
        [
            label.to_owned(),
            none(),
            plain,
            none(),
            flags,
            none(),
            none(),
        ]
    };
    let requests_target = if *size == REQUESTS_SIZE {
        at_most(1400.0, requests[0])
    } else {
        String::new()
    };
    let a_tenant = requests.map(|requests| requests / f64::from(*size));
    vec![
        row(
            "first Ready (floors: available), s",
            first,
            2,
            at_most(1.5, first[0]),
        ),
        row(
            "all Ready (floors: helm and pods), s",
            all,
            2,
            ratios_at_most(1.2, all),
        ),
        floors("  helm ended, s", &ended),
        floors("  Deployments available, s", &available),
        row("CPU with helm's, s", cpu, 2, ratios_at_most(1.15, cpu)),
        ours(
            "  of it the hub itself",
            krypton.many.hub_cpu_seconds,
            2,
            String::new(),
        ),
        row(
            "requests to the edge, everybody's",
            requests,
            0,
            requests_target,
        ),
        row("  for each Tenant", a_tenant, 1, String::new()),
        row(
            "  of them the hub's and helm's",
            many.map(of_subject),
            0,
            String::new(),
        ),
        ours(
            "requests of the hub to home",
            krypton.home.of_subject as f64,
            0,
            String::new(),
        ),
        ours(
            "RSS of the hub, MiB",
            krypton.rss_bytes as f64 / MIB,
            1,
            String::new(),
        ),
        ours(
            "  its peak",
            krypton.peak_rss_bytes as f64 / MIB,
            1,
            String::new(),
        ),
        row(
            "one more Tenant: Ready, s",
            single.map(end),
            2,
            String::new(),
        ),
        row(
            "  CPU with helm's, s",
            single.map(|work| work.cpu_seconds),
            2,
            String::new(),
        ),
        row(
            "  requests of the hub and helm",
            single.map(of_subject),
            0,
            String::new(),
        ),
    ]
}

fn idle_rows(idle: &Idle, span: Duration) -> Vec<Row> {
    let minutes = span.as_secs_f64() / 60.0;
    let cpu = 100.0 * idle.cpu_seconds / span.as_secs_f64();
    let a_minute = |count: u64| count as f64 / minutes;
    let to_edge = a_minute(idle.with_hub.edge.of_subject);
    let plain = |label: &str, count: u64| ours(label, a_minute(count), 1, String::new());
    let rss = idle.rss_bytes as f64 / MIB;
    vec![
        ours(
            "idle: CPU of the hub, % of a core",
            cpu,
            3,
            at_most(0.05, cpu),
        ),
        ours(
            "idle: requests a minute, of the hub to the edge",
            to_edge,
            1,
            at_most(8.0, to_edge),
        ),
        plain(
            "  everybody's to the edge, with the hub",
            idle.with_hub.edge.total(),
        ),
        plain(
            "  everybody's to the edge, without",
            idle.without_hub.edge.total(),
        ),
        plain("  of the hub to home", idle.with_hub.home.of_subject),
        plain(
            "  everybody's to home, with the hub",
            idle.with_hub.home.total(),
        ),
        plain(
            "  everybody's to home, without",
            idle.without_hub.home.total(),
        ),
        ours("idle: RSS of the hub, MiB", rss, 1, String::new()),
    ]
}

fn noise(measured: &Measured) -> String {
    let Measured {
        krypton,
        plain,
        same_flags,
        ..
    } = measured;
    let mut noise = vec![
        ("krypton", krypton.many.neighbours),
        ("helm alone", plain.many.neighbours),
        ("hub's flags", same_flags.many.neighbours),
    ];
    if let Some(idle) = &krypton.idle {
        noise.push(("idle", idle.with_hub.neighbours));
    }
    let told: Vec<_> = noise
        .iter()
        .map(|(what, cores)| format!("{what} {cores:.2}"))
        .collect();
    let mut out = format!(
        "Cores kept busy by others meanwhile: {}.\n",
        told.join(", ")
    );
    if noise.iter().any(|(_, cores)| *cores > QUIET_CORES) {
        out += "NOT A QUIET MACHINE: times and their ratios are disturbed; counts are not.\n";
    }
    out
}

fn row(label: &str, figures: [f64; 3], digits: usize, target: String) -> Row {
    let ratio = |floor: f64| {
        if floor > 0.0 {
            fixed(figures[0] / floor, 2)
        } else {
            String::new()
        }
    };
    let [is, plain, flags] = figures.map(|figure| fixed(figure, digits));
    [
        label.to_owned(),
        is,
        plain,
        ratio(figures[1]),
        flags,
        ratio(figures[2]),
        target,
    ]
}

/// A figure that the floors do not have.
fn ours(label: &str, is: f64, digits: usize, target: String) -> Row {
    let none = String::new;
    [
        label.to_owned(),
        fixed(is, digits),
        none(),
        none(),
        none(),
        none(),
        target,
    ]
}

fn ratios_at_most(target: f64, [is, plain, flags]: [f64; 3]) -> String {
    let [plain, flags] = [plain, flags].map(|floor| verdict(target, is / floor));
    format!("ratio <= {target}: {plain}, {flags}")
}

/// By verb and resource, the most costly first; last what the first column has more than the last,
/// for each Tenant.
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
        let more = (*first as f64 - *last as f64) / f64::from(tenants);
        let counts: String = counts.iter().map(|count| format!("{count:>9}")).collect();
        format!("{counts} {more:>+8.1}  {label}\n")
    };
    let heads: String = heads.iter().map(|head| format!("{head:>9}")).collect();
    let mut out = format!("{heads} {:>8}\n", "more");
    for ((verb, resource), counts) in rows.iter().take(SHOWN) {
        // What is no resource: discovery, OpenAPI, version.
        let resource = if resource.is_empty() {
            "(discovery and others)"
        } else {
            resource
        };
        out += &line(&format!("{verb} {resource}"), counts);
    }
    let sum = |rows: &[(_, Vec<u64>)]| -> Vec<u64> {
        let column = |column: usize| {
            rows.iter()
                .filter_map(|(_, counts)| counts.get(column))
                .sum()
        };
        (0..columns.len()).map(column).collect()
    };
    if let Some(rest) = rows.get(SHOWN..).filter(|rest| !rest.is_empty()) {
        out += &line("others", &sum(rest));
    }
    out + &line("all", &sum(&rows))
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
    fn a_figure_has_a_ratio_and_a_verdict_for_each_floor() {
        let times = [6.0, 5.0, 4.0];
        let row = row("all Ready, s", times, 2, ratios_at_most(1.2, times));
        let verdict = "ratio <= 1.2: met, missed";
        assert_eq!(
            row,
            [
                "all Ready, s",
                "6.00",
                "5.00",
                "1.20",
                "4.00",
                "1.50",
                verdict
            ]
        );
        let alone = ours("idle", 0.06, 3, at_most(0.05, 0.06));
        assert_eq!(alone, ["idle", "0.060", "", "", "", "", "<= 0.05: missed"]);
    }

    #[test]
    fn without_a_floor_there_is_no_ratio() {
        let row = row("nothing", [1.0, 0.0, 2.0], 0, String::new());
        assert_eq!(row, ["nothing", "1", "0", "", "2", "0.50", ""]);
    }

    #[test]
    fn the_breakdown_begins_with_what_costs_most_and_ends_with_the_sum() {
        let ours = counts(&[("GET", "secrets", 60), ("PATCH", "tenants", 90)]);
        let others = counts(&[("GET", "secrets", 30), ("GET", "", 5)]);
        let rendered = breakdown(&["ours", "others"], &[&ours, &others], 30);
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

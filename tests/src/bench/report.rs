//! The table of one size: figures beside the floor's and the targets, and where requests went.

use std::{collections::BTreeSet, time::Duration};

use crate::{
    FloorFlags,
    floor::Floor,
    krypton::{Idle, Krypton, Work},
    traffic::Counts,
};

const MIB: f64 = 1024.0 * 1024.0;
/// Others' work beyond this makes times of little worth.
const QUIET_CORES: f64 = 0.15;
/// The number of Tenants that the target for requests was set for.
const REQUESTS_SIZE: u32 = 30;
const HEADS: [&str; 5] = ["figure", "krypton", "floor", "ratio", "target"];
const MISSED: &str = "missed";
/// Rows of the breakdown; the rest is summed up.
const SHOWN: usize = 24;

/// All of one size.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) size: u32,
    pub(crate) idle: Duration,
    pub(crate) floor_flags: FloorFlags,
    pub(crate) krypton: Krypton,
    pub(crate) floor: Floor,
}

type Row = [String; 5];

pub(crate) fn render(measured: &Measured) -> String {
    let flags = match measured.floor_flags {
        FloorFlags::Plain => "plain helm",
        FloorFlags::Hub => "plain helm with the hub's flags",
    };
    let mut out = format!(
        "\n== {} Tenants at once on one edge; floor: xargs -P4 {flags}, namespaces made before ==\n",
        measured.size
    );
    let mut rows = work(measured);
    if let Some(idle) = &measured.krypton.idle {
        rows.extend(idle_rows(idle, measured.idle));
    }
    out += &table(&rows);
    out += &notes(measured);
    let (krypton, floor) = (&measured.krypton, &measured.floor);
    out += &format!(
        "\nrequests to the edge for {} Tenants, everybody's\n{}\
         \nrequests to the edge for one more Tenant, alone and with warm caches, everybody's\n{}",
        measured.size,
        breakdown(&krypton.many.edge.all, &floor.many.edge.all, measured.size),
        breakdown(&krypton.single.edge.all, &floor.single.edge.all, 1),
    );
    if let Some(idle) = &krypton.idle {
        out += &format!(
            "\nrequests to the edge while idle for {} s: with the hub, and without\n{}",
            measured.idle.as_secs(),
            breakdown(&idle.with_hub.edge.all, &idle.without_hub.edge.all, 1),
        );
    }
    out
}

fn work(measured: &Measured) -> Vec<Row> {
    let (ours, floors) = (&measured.krypton.many, &measured.floor.many);
    let end = |work: &Work| work.arrivals.last.max(work.helm_ended.unwrap_or_default());
    let [first, all] = [ours.arrivals.first, end(ours)].map(|time| time.as_secs_f64());
    let [floor_first, floor_available, floor_all] =
        [floors.arrivals.first, floors.arrivals.last, end(floors)].map(|time| time.as_secs_f64());
    let helm_ended = floors.helm_ended.unwrap_or_default().as_secs_f64();
    let [requests, floor_requests] = [ours, floors].map(|work| work.edge.total() as f64);
    let [by_us, by_floor] = [ours, floors].map(|work| work.edge.of_subject as f64);
    let requests_target = (measured.size == REQUESTS_SIZE).then_some((1400.0, requests));
    let krypton = &measured.krypton;
    let single = [&krypton.single, &measured.floor.single];
    let single_end = single.map(|work| end(work).as_secs_f64());
    vec![
        row(
            "first Ready (floor: available), s",
            first,
            Some(floor_first),
            2,
            at_most(1.5, first),
        ),
        row(
            "all Ready (floor: helm and pods), s",
            all,
            Some(floor_all),
            2,
            ratio_at_most(1.2, all / floor_all),
        ),
        [
            "  helm ended, s".to_owned(),
            String::new(),
            fixed(helm_ended, 2),
            String::new(),
            String::new(),
        ],
        [
            "  Deployments available, s".to_owned(),
            String::new(),
            fixed(floor_available, 2),
            String::new(),
            String::new(),
        ],
        row(
            "CPU with helm's, s",
            ours.cpu_seconds,
            Some(floors.cpu_seconds),
            2,
            ratio_at_most(1.15, ours.cpu_seconds / floors.cpu_seconds),
        ),
        row(
            "requests to the edge, everybody's",
            requests,
            Some(floor_requests),
            0,
            requests_target
                .map(|(target, is)| at_most(target, is))
                .unwrap_or_default(),
        ),
        row(
            "  of them the hub's and helm's",
            by_us,
            Some(by_floor),
            0,
            String::new(),
        ),
        row(
            "  a Tenant",
            requests / f64::from(measured.size),
            Some(floor_requests / f64::from(measured.size)),
            1,
            String::new(),
        ),
        row(
            "requests of the hub to home",
            krypton.home.of_subject as f64,
            None,
            0,
            String::new(),
        ),
        row(
            "RSS of the hub, MiB",
            krypton.rss_bytes as f64 / MIB,
            None,
            1,
            String::new(),
        ),
        row(
            "  its peak",
            krypton.peak_rss_bytes as f64 / MIB,
            None,
            1,
            String::new(),
        ),
        row(
            "one more Tenant: Ready, s",
            single_end[0],
            Some(single_end[1]),
            2,
            String::new(),
        ),
        row(
            "  CPU with helm's, s",
            single[0].cpu_seconds,
            Some(single[1].cpu_seconds),
            2,
            String::new(),
        ),
        row(
            "  requests of the hub and helm",
            single[0].edge.of_subject as f64,
            Some(single[1].edge.of_subject as f64),
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
    let plain = |label: &str, is: f64, digits| row(label, is, None, digits, String::new());
    vec![
        row(
            "idle: CPU of the hub, % of a core",
            cpu,
            None,
            3,
            at_most(0.05, cpu),
        ),
        row(
            "idle: requests a minute of the hub to the edge",
            to_edge,
            None,
            1,
            at_most(8.0, to_edge),
        ),
        plain(
            "  everybody's to the edge, with the hub",
            a_minute(idle.with_hub.edge.total()),
            1,
        ),
        plain(
            "  everybody's to the edge, without",
            a_minute(idle.without_hub.edge.total()),
            1,
        ),
        plain(
            "  of the hub to home",
            a_minute(idle.with_hub.home.of_subject),
            1,
        ),
        plain(
            "  everybody's to home, with the hub",
            a_minute(idle.with_hub.home.total()),
            1,
        ),
        plain(
            "  everybody's to home, without",
            a_minute(idle.without_hub.home.total()),
            1,
        ),
        plain("idle: RSS of the hub, MiB", idle.rss_bytes as f64 / MIB, 1),
    ]
}

fn notes(measured: &Measured) -> String {
    let mut out = String::from(
        "CPU and requests are until 5 s after the last. Requests of the hub and of helm are those of\n\
         their user, a watch counted when it begins; everybody's are of controllers, scheduler, node,\n\
         apiserver and this benchmark too, a watch counted when it ends.\n",
    );
    let mut noise = vec![
        ("krypton", measured.krypton.many.neighbours),
        ("floor", measured.floor.many.neighbours),
    ];
    if let Some(idle) = &measured.krypton.idle {
        noise.push(("idle", idle.with_hub.neighbours));
    }
    let told: Vec<_> = noise
        .iter()
        .map(|(what, cores)| format!("{what} {cores:.2}"))
        .collect();
    out += &format!("cores kept busy by others meanwhile: {}\n", told.join(", "));
    if noise.iter().any(|(_, cores)| *cores > QUIET_CORES) {
        out += "NOT A QUIET MACHINE: times and ratios of times are disturbed; counts are not.\n";
    }
    out
}

fn row(label: &str, krypton: f64, floor: Option<f64>, digits: usize, target: String) -> Row {
    [
        label.to_owned(),
        fixed(krypton, digits),
        floor.map(|floor| fixed(floor, digits)).unwrap_or_default(),
        floor
            .filter(|floor| *floor > 0.0)
            .map(|floor| fixed(krypton / floor, 2))
            .unwrap_or_default(),
        target,
    ]
}

fn fixed(value: f64, digits: usize) -> String {
    format!("{value:.digits$}")
}

fn at_most(target: f64, is: f64) -> String {
    let verdict = if is <= target { "met" } else { MISSED };
    format!("<= {target}: {verdict}")
}

fn ratio_at_most(target: f64, is: f64) -> String {
    format!("ratio {}", at_most(target, is))
}

fn table(rows: &[Row]) -> String {
    let heads = HEADS.map(str::to_owned);
    let all: Vec<&Row> = std::iter::once(&heads).chain(rows).collect();
    let width = |column: usize| {
        all.iter()
            .filter_map(|row| row.get(column))
            .map(String::len)
            .max()
            .unwrap_or_default()
    };
    let widths = [0, 1, 2, 3].map(width);
    let mut out = String::new();
    for [label, krypton, floor, ratio, target] in all {
        let line = format!(
            "{label:<0$}  {krypton:>1$}  {floor:>2$}  {ratio:>3$}  {target}",
            widths[0], widths[1], widths[2], widths[3]
        );
        out += line.trim_end();
        out.push('\n');
    }
    out
}

/// By verb and resource, the most costly first: ours, the other's, and the difference a Tenant.
fn breakdown(ours: &Counts, others: &Counts, tenants: u32) -> String {
    let keys: BTreeSet<_> = ours.keys().chain(others.keys()).collect();
    let at = |counts: &Counts, key| counts.get(key).copied().unwrap_or_default();
    let mut rows: Vec<_> = keys
        .into_iter()
        .map(|key| (key, at(ours, key), at(others, key)))
        .collect();
    rows.sort_by_key(|(key, ours, others)| (std::cmp::Reverse((*ours).max(*others)), *key));
    let line = |label: &str, ours: u64, others: u64| {
        let more = (ours as f64 - others as f64) / f64::from(tenants);
        format!("  {ours:>7} {others:>7} {more:>+8.1}  {label}\n")
    };
    let mut out = format!("  {:>7} {:>7} {:>8}\n", "ours", "other", "a Tenant");
    for ((verb, resource), ours, others) in rows.iter().take(SHOWN) {
        // What is no resource: discovery, OpenAPI, version.
        let resource = if resource.is_empty() {
            "(discovery and others)"
        } else {
            resource
        };
        out += &line(&format!("{verb} {resource}"), *ours, *others);
    }
    let rest = rows.iter().skip(SHOWN);
    let rest = rest.fold((0, 0), |sum, (_, ours, others)| {
        (sum.0 + ours, sum.1 + others)
    });
    if rest != (0, 0) {
        out += &line("others", rest.0, rest.1);
    }
    out + &line("all", ours.values().sum(), others.values().sum())
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
    fn a_figure_beside_its_floor_has_a_ratio_and_a_verdict() {
        let met = row("all Ready, s", 6.0, Some(5.0), 2, ratio_at_most(1.2, 1.2));
        assert_eq!(
            met,
            ["all Ready, s", "6.00", "5.00", "1.20", "ratio <= 1.2: met"]
        );
        let alone = row("idle", 0.06, None, 3, at_most(0.05, 0.06));
        assert_eq!(alone, ["idle", "0.060", "", "", "<= 0.05: missed"]);
        assert_eq!(row("nothing", 1.0, Some(0.0), 0, String::new())[3], "");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_where_text_does() {
        let rendered = table(&[row("a", 12345.0, Some(1.0), 0, String::new())]);
        assert_eq!(
            rendered,
            "figure  krypton  floor  ratio     target\na         12345      1  12345.00\n"
        );
    }

    #[test]
    fn the_breakdown_begins_with_what_costs_most_and_ends_with_the_sum() {
        let ours = counts(&[("GET", "secrets", 60), ("PATCH", "tenants", 90)]);
        let others = counts(&[("GET", "secrets", 30), ("GET", "", 5)]);
        let rendered = breakdown(&ours, &others, 30);
        let lines: Vec<_> = rendered
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .collect();
        assert_eq!(lines[1], ["90", "0", "+3.0", "PATCH", "tenants"]);
        assert_eq!(lines[2], ["60", "30", "+1.0", "GET", "secrets"]);
        assert_eq!(
            lines[3],
            ["0", "5", "-0.2", "GET", "(discovery", "and", "others)"]
        );
        assert_eq!(lines[4], ["150", "35", "+3.8", "all"]);
    }
}

//! Verifies that alerts, dashboard and documentation use the existing metric names, and that the metrics change with
//! the state.

mod exposition;
mod expression;
mod stage;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
};

use anyhow::{Result, bail};
use krypton_tests::{
    Hub, HubOptions, Membership, Mode, Parts, STEP_DEADLINE, ServedChart, TestResult, Tools,
    by_agent, eventually, fleet::FleetClient, home_and_edge, process::Invocation,
};
use serde_json::{Value, json};

use crate::docs::generated::check;
use crate::docs_commands::pages::{read, root};
use exposition::{Exposition, Kind};
use expression::{Expression, FUNCTIONS};

/// Labels that Prometheus adds to every series.
const TARGET_LABELS: [&str; 3] = ["job", "instance", "pod"];
/// All other labels have few values, and none is a Tenant.
const LABELS: [&str; 19] = [
    "action",
    "certificate",
    "credential",
    "kind",
    "le",
    "member",
    "mode",
    "outcome",
    "phase",
    "priority",
    "queue",
    "reason",
    "resource",
    "sender",
    "source",
    "verb",
    "version",
    "instance",
    "job",
];
const CHARTS: [&str; 2] = ["krypton-hub", "krypton-agent"];

/// Returns the metrics of a hub and an agent with every series.
fn all_metrics() -> Exposition {
    Exposition::parse(&[stage::hub(), stage::agent()])
}

pub(crate) struct Alert {
    pub(crate) chart: &'static str,
    pub(crate) name: String,
    pub(crate) rule: Value,
}

impl Alert {
    fn expression(&self) -> Expression {
        let text = self.rule["expr"].as_str().unwrap();
        Expression::parse(text).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

pub(crate) fn alerts() -> Vec<Alert> {
    let mut alerts = Vec::new();
    for chart in CHARTS {
        let file: Value =
            serde_saphyr::from_str(&read(&format!("charts/{chart}/files/alerts.yaml"))).unwrap();
        for rule in file["rules"].as_array().unwrap() {
            alerts.push(Alert {
                chart,
                name: rule["alert"].as_str().unwrap().to_owned(),
                rule: rule.clone(),
            });
        }
    }
    alerts
}

/// Evaluates the alerts over the series of tests/alerts.
#[tokio::test]
async fn each_alert_fires_only_on_its_condition() -> TestResult {
    let promtool = Tools::find()?.program("promtool")?;
    let alerts = alerts();
    for chart in CHARTS {
        let series = read(&format!("tests/alerts/{chart}.yaml"));
        let tested: BTreeSet<&str> = series
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- name: "))
            .collect();
        let of_chart = alerts.iter().filter(|alert| alert.chart == chart);
        let names: BTreeSet<&str> = of_chart.clone().map(|alert| alert.name.as_str()).collect();
        assert_eq!(tested, names, "tests/alerts/{chart}.yaml");
        let rules: Vec<&Value> = of_chart.map(|alert| &alert.rule).collect();
        let groups = json!({"groups": [{"name": chart, "rules": rules}]});
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("rules.yaml"), groups.to_string())?;
        let file = folder.path().join("series.yaml");
        fs::write(&file, series)?;
        let test = Invocation::new(promtool.clone())
            .args(["test", "rules"].map(OsString::from))
            .arg(file);
        test.output(STEP_DEADLINE).await?;
    }
    Ok(())
}

/// Returns all expressions of the dashboard.
fn dashboard() -> Vec<String> {
    fn walk(value: &Value, names: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value.as_str() {
                        Some(text) if name == "expr" => names.push(text.to_owned()),
                        _ => walk(value, names),
                    }
                }
            }
            Value::Array(values) => values.iter().for_each(|value| walk(value, names)),
            _ => {}
        }
    }
    let file: Value =
        serde_json::from_str(&read("charts/krypton-hub/files/dashboard.json")).unwrap();
    let mut names = Vec::new();
    walk(&file, &mut names);
    names
}

/// Returns the problems of an expression, given the existing series.
fn expression_problems(expression: &Expression, exposition: &Exposition) -> Vec<String> {
    let mut problems = Vec::new();
    let mut labels: BTreeSet<&str> = TARGET_LABELS.into();
    labels.insert("le");
    for selector in &expression.selectors {
        let Some(family) = exposition.family_of(&selector.metric) else {
            problems.push(format!("there is no {}", selector.metric));
            continue;
        };
        labels.extend(family.labels.keys().map(String::as_str));
        for matcher in &selector.matchers {
            if TARGET_LABELS.contains(&matcher.label.as_str()) {
                continue;
            }
            let Some(values) = family.labels.get(&matcher.label) else {
                problems.push(format!(
                    "{} has no label {}",
                    selector.metric, matcher.label
                ));
                continue;
            };
            let unknown = matcher.literals().find(|value| !values.contains(*value));
            problems.extend(unknown.map(|value| {
                format!(
                    "{} is never {value:?} of {}",
                    matcher.label, selector.metric
                )
            }));
        }
        if !exposition
            .samples
            .iter()
            .any(|sample| selector.selects(sample))
        {
            problems.push(format!("{selector} selects nothing"));
        }
    }
    for label in &expression.grouping {
        if !labels.contains(label.as_str()) {
            problems.push(format!("nothing has the label {label}"));
        }
    }
    for function in &expression.functions {
        if !FUNCTIONS.contains(&function.as_str()) {
            problems.push(format!("{function} is no function"));
        }
    }
    problems
}

#[test]
fn alert_and_dashboard_expressions_match_served_metrics() {
    let exposition = all_metrics();
    let (alerts, dashboard) = (alerts(), dashboard());
    assert!(alerts.len() > 25 && dashboard.len() > 30);
    let of_alerts = alerts
        .iter()
        .map(|alert| (alert.name.clone(), alert.expression()));
    let of_dashboard = dashboard.iter().map(|text| {
        let expression = Expression::parse(text);
        let expression = expression.unwrap_or_else(|error| panic!("{text}: {error}"));
        (text.clone(), expression)
    });
    let problems: Vec<(String, Vec<String>)> = of_alerts
        .chain(of_dashboard)
        .map(|(name, expression)| (name, expression_problems(&expression, &exposition)))
        .filter(|(_, problems)| !problems.is_empty())
        .collect();
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn unknown_metric_label_or_value_is_reported() {
    let exposition = all_metrics();
    for (text, word) in [
        ("krypton_hub_leaders == 0", "there is no"),
        ("krypton_hub_helm_runs == 0", "there is no"),
        ("krypton_hub_leader{member=\"a\"} == 0", "has no label"),
        (
            "krypton_hub_helm_runs_total{outcome=\"okay\"} > 0",
            "is never",
        ),
        ("sum by (tenant) (krypton_hub_leader) > 0", "has the label"),
        ("summ(krypton_hub_leader) > 0", "is no function"),
    ] {
        let expression = Expression::parse(text).unwrap();
        let problems = expression_problems(&expression, &exposition).join("; ");
        assert!(problems.contains(word), "{text}: {problems}");
    }
    for text in ["sum(krypton_hub_leader", "krypton_hub_leader{of=\"a}"] {
        assert!(Expression::parse(text).is_err(), "{text}");
    }
}

/// Returns all parts of a text that start like a metric's name.
fn names_in(text: &str) -> BTreeSet<&str> {
    let in_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    text.split(|c| !in_name(c))
        .filter(|word| {
            let rest = ["krypton_hub_", "krypton_agent_"]
                .iter()
                .find_map(|prefix| word.strip_prefix(prefix));
            rest.is_some_and(|rest| !rest.is_empty())
        })
        .collect()
}

#[test]
fn metrics_named_in_docs_and_benchmarks_exist() -> TestResult {
    let exposition = all_metrics();
    let mut texts = vec![("README.md".to_owned(), read("README.md"))];
    let mut folders = vec![root().join("docs"), root().join("tests/src/bench")];
    while let Some(folder) = folders.pop() {
        for file in fs::read_dir(folder)? {
            let path = file?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                texts.push((path.display().to_string(), fs::read_to_string(&path)?));
            }
        }
    }
    let mut count = 0;
    for (file, text) in &texts {
        for name in names_in(text) {
            // A name that ends with an underscore stands for all names with this prefix.
            let begins = |family: &str| name.ends_with('_') && family.starts_with(name);
            let known = exposition.family_of(name).is_some()
                || exposition
                    .families
                    .keys()
                    .any(|family| family == name || begins(family));
            assert!(known, "{file} names {name}");
            count += 1;
        }
    }
    assert!(count > 40, "{count}");
    Ok(())
}

#[test]
fn metrics_have_help_and_units_and_few_labels() {
    for (name, family) in &all_metrics().families {
        assert!(family.help.len() > 10, "{name}: {:?}", family.help);
        assert!(
            family.help.ends_with('.') && !family.help.ends_with(".."),
            "{name}"
        );
        let unit = ["seconds", "bytes"]
            .into_iter()
            .find(|unit| name.ends_with(unit));
        assert_eq!(family.unit.as_deref(), unit, "{name}");
        if name.contains("timestamp") {
            assert!(name.ends_with("_timestamp_seconds"), "{name}");
        }
        if family.kind == Kind::Histogram {
            assert!(unit.is_some(), "{name}");
        }
        for label in family.labels.keys() {
            assert!(LABELS.contains(&label.as_str()), "{name} has {label}");
        }
    }
}

/// Returns the tables of all metrics.
fn tables() -> String {
    let mut tables = String::new();
    let titles = [
        ("krypton_hub_", "The hub"),
        ("krypton_agent_", "The agent"),
        ("process_", "Both processes"),
    ];
    let exposition = all_metrics();
    for (prefix, title) in titles {
        tables += &format!(
            "## {title}\n\n| Metric | Type | Labels | Meaning |\n| --- | --- | --- | --- |\n"
        );
        for (name, family) in exposition
            .families
            .iter()
            .filter(|(name, _)| name.starts_with(prefix))
        {
            let labels = family.labels.iter().filter(|(label, _)| *label != "le");
            let labels: Vec<String> = labels
                .map(|(label, values)| match label.as_str() {
                    "member" | "version" => format!("`{label}`"),
                    _ => {
                        let values: Vec<&str> = values.iter().map(String::as_str).collect();
                        format!("`{label}`: {}", values.join(", "))
                    }
                })
                .collect();
            let name = format!("{name}{}", family.kind.suffix());
            let (kind, labels) = (family.kind.name(), labels.join("; "));
            tables += &format!("| `{name}` | {kind} | {labels} | {} |\n", family.help);
        }
        tables += "\n";
    }
    tables
}

#[test]
fn docs_metrics_page_is_current() -> Result<(), String> {
    check("metrics.md", &tables())
}

#[test]
fn runbook_sections_match_alerts_and_give_steps() {
    let page = read("docs/reference/runbook.md");
    let sections = page.split("\n## ").skip(1);
    let sections: BTreeMap<&str, &str> = sections
        .filter_map(|section| section.split_once('\n'))
        .map(|(title, text)| (title.trim(), text))
        .collect();
    let alerts = alerts();
    let names: BTreeSet<&str> = alerts.iter().map(|alert| alert.name.as_str()).collect();
    let titles: BTreeSet<&str> = sections.keys().copied().collect();
    assert_eq!(names, titles);
    for (title, text) in sections {
        let mut rest = text;
        for part in [
            "**Meaning.**",
            "**Impact.**",
            "**Diagnosis.**",
            "**Mitigation.**",
        ] {
            let split = rest.split_once(part);
            let (_, after) = split.unwrap_or_else(|| panic!("{title} lacks {part}"));
            assert!(after.trim_start().len() > 20, "{title}: {part}");
            rest = after;
        }
    }
    for Alert { name, rule, chart } in &alerts {
        let severity = rule["labels"]["severity"].as_str().unwrap_or_default();
        assert!(
            ["critical", "warning", "info"].contains(&severity),
            "{name} of {chart}"
        );
        for annotation in ["summary", "description"] {
            let text = rule["annotations"][annotation].as_str().unwrap_or_default();
            assert!(text.len() > 10, "{name} of {chart}: {annotation}");
        }
        let for_ = rule["for"].as_str();
        let timely = for_.is_some() || severity == "info" || name.ends_with("Restarts");
        assert!(timely, "{name} of {chart} fires immediately");
    }
}

/// Verifies that each alert's series exist in the state that it detects.
#[test]
fn state_alerts_find_their_series_in_exposition() {
    let hub = Exposition::parse(&[stage::ailing_hub()]);
    let agent = Exposition::parse(&[stage::ailing_agent()]);
    let standby = Exposition::parse(&[stage::hub_that_follows()]);
    let after = |exposition: &Exposition, name: &str, labels: &[(&str, &str)]| {
        let value = exposition.value(name, labels);
        value.unwrap_or_else(|| panic!("no {name} {labels:?}"))
    };
    let edge = ("member", "edge-1");
    let now = jiff::Timestamp::now().as_second() as f64;
    let state = |exposition: &Exposition, name: &str, labels: &[(&str, &str)]| {
        after(exposition, &format!("krypton_hub_{name}"), labels)
    };
    // KryptonHubNoLeader: the series exists and is 0.
    assert_eq!(state(&standby, "leader", &[]), 0.0);
    assert_eq!(state(&hub, "leader", &[]), 1.0);
    // KryptonFleetDisconnected: series of the leader with the same labels, which can be compared.
    let (all, connected) = (
        state(&hub, "members", &[]),
        state(&hub, "members_connected", &[]),
    );
    assert!(
        connected < 0.8 * all && all - connected > 2.0,
        "{connected} of {all}"
    );
    // KryptonMemberDisconnected.
    assert_eq!(
        state(&hub, "member_connected", &[("member", "lost-1")]),
        0.0
    );
    let asleep = hub.value("krypton_hub_member_connected", &[("member", "asleep")]);
    assert_eq!(asleep, None, "a healthy state fires no alert");
    // KryptonMemberBehind.
    assert!(state(&hub, "member_behind_seconds", &[edge]) > 900.0);
    assert_eq!(state(&hub, "member_connected", &[edge]), 1.0);
    // KryptonTenantsFailing, KryptonTenantsPending.
    for phase in ["error", "pending"] {
        assert_eq!(
            state(&hub, "member_tenants", &[edge, ("phase", phase)]),
            1.0
        );
    }
    // KryptonCertificateExpires, both of them; KryptonAccessExpires.
    for credential in ["agent", "access"] {
        let labels = [edge, ("credential", credential)];
        assert_eq!(state(&hub, "member_credential_due", &labels), 1.0);
    }
    let end = state(&hub, "agent_certificate_expiry_timestamp_seconds", &[edge]);
    assert!(end - now < 86_400.0, "{end}");
    assert_eq!(state(&hub, "member_mode", &[edge, ("mode", "agent")]), 1.0);
    // KryptonHubCertificateExpires.
    for (which, days) in [("ca", 90.0), ("hub", 14.0)] {
        let labels = [("certificate", which)];
        let end = state(&hub, "certificate_expiry_timestamp_seconds", &labels);
        assert!(end - now < days * 86_400.0, "{which}: {end}");
    }
    // KryptonAgentNoHub, KryptonAgentNoLease, KryptonAgentCertificateExpires.
    let state = |name: &str| after(&agent, &format!("krypton_agent_{name}"), &[]);
    assert_eq!(state("session_connected"), 0.0);
    assert_eq!(state("leases_held"), 0.0);
    assert!(state("certificate_expiry_timestamp_seconds") - now < 86_400.0);
}

by_agent!(metrics_reflect_helm_runs_member_loss_and_lag);

/// Waits until the value of the series satisfies `fits`.
async fn wait_for_value(
    scrape: impl AsyncFn() -> Result<String>,
    name: &str,
    labels: &[(&str, &str)],
    fits: impl Fn(f64) -> bool,
) {
    eventually(&format!("{name} {labels:?}"), async || {
        let exposition = Exposition::parse(&[scrape().await?]);
        match exposition.value(name, labels) {
            Some(value) if fits(value) => Ok(Some(())),
            value => bail!("found {value:?}"),
        }
    })
    .await
    .unwrap();
}

async fn metrics_reflect_helm_runs_member_loss_and_lag(mode: Mode) -> TestResult {
    let chart = ServedChart::small("replicaCount: 0").await?;
    let (home, edge) = home_and_edge("metrics", Parts::ControlPlane).await?;
    let at_edge = FleetClient::new(&edge);
    let flags = chart.flags(&["--self-cluster=false", "--proxy-grace=5s"]);
    let options = HubOptions::new(home.kubeconfig()).args(flags);
    let mut hub = Hub::start(&options)?;
    let mut member = Membership::join(mode, &mut hub, &home, &edge, "edge-1").await?;
    at_edge.install("acme").await?;
    let edge_1 = ("member", "edge-1");
    let at_hub = async || hub.metrics().await;
    wait_for_value(at_hub, "krypton_hub_leader", &[], |value| value == 1.0).await;
    let connected = "krypton_hub_member_connected";
    wait_for_value(at_hub, connected, &[edge_1], |value| value == 1.0).await;
    let behind = "krypton_hub_member_behind_seconds";
    wait_for_value(at_hub, behind, &[edge_1], |value| value == 0.0).await;
    let tenants = "krypton_hub_member_tenants";
    let phase = |phase| [edge_1, ("phase", phase)];
    wait_for_value(at_hub, tenants, &phase("ready"), |value| value == 1.0).await;

    chart.write("{replicaCount: 0, broken: true}")?;
    let failed = ("ClusterError/edge-1", "True", "UpgradeFailed");
    at_edge.wait_for("acme", &[failed]).await?;
    wait_for_value(at_hub, tenants, &phase("error"), |value| value == 1.0).await;
    let (prefix, text) = match member.agent() {
        Some(agent) => ("krypton_agent", agent.metrics().await?),
        None => ("krypton_hub", hub.metrics().await?),
    };
    let exposition = Exposition::parse(&[text]);
    let value = |name: &str, labels: &[(&str, &str)]| {
        let name = format!("{prefix}_{name}");
        let found = exposition.value(&name, labels);
        found.unwrap_or_else(|| panic!("no {name} {labels:?}"))
    };
    let runs = |verb, outcome| value("helm_runs_total", &[("verb", verb), ("outcome", outcome)]);
    assert_eq!(runs("install", "ok"), 1.0);
    assert!(runs("upgrade", "failed") >= 1.0);
    let installs = [("verb", "install")];
    assert_eq!(value("helm_run_duration_seconds_count", &installs), 1.0);
    assert_eq!(value("leases_held", &[]), 1.0);
    assert_eq!(value("chart_cache_charts", &[]), 1.0);
    let fetched = [("source", "repository"), ("outcome", "ok")];
    assert_eq!(value("chart_fetches_total", &fetched), 1.0);
    let actions = [("action", "install"), ("outcome", "ok")];
    assert_eq!(value("reconciles_total", &actions), 1.0);
    let named = exposition
        .families
        .keys()
        .filter(|name| name.starts_with("process_"));
    assert_eq!(named.count(), 5);

    match member.agent() {
        Some(agent) => agent.kill9().await?,
        None => edge.stop_apiserver().await?,
    }
    wait_for_value(at_hub, connected, &[edge_1], |value| value == 0.0).await;
    chart.write("{replicaCount: 0, message: later}")?;
    wait_for_value(at_hub, behind, &[edge_1], |value| value > 0.0).await;
    Ok(())
}

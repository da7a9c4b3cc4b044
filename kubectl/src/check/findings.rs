//! Judges what `check` has read. Pure: equal answers produce equal lines.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::version::Info;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::{SCHEMA_VERSION, schema_version};
use krypton_runtime::crd::established;
use kube::CustomResourceExt as _;
use serde_json::Value;

use crate::error::KubectlError;
use crate::explain::sources::Answer;
use crate::explain::story::Explainer;
use crate::render::{decoded, text_at};
use crate::statement::{Line, Mark};

/// Oldest minor version of Kubernetes 1 whose API servers accept the CRDs.
const MINOR_LEAST: u32 = 30;
const PROGRAM: &str = env!("CARGO_PKG_VERSION");
/// Members with a defect that have their own lines.
const MEMBERS_MOST: usize = 20;

const INSTALL: &str = "see docs/how-to/install.md#prerequisites";
const CRDS: &str = "install the hub's chart, which contains it; see docs/how-to/upgrade.md#crds";
const ORIGINAL: &str =
    "the hub replaces it and keeps the objects; read docs/how-to/migrate.md before you install it";
const HUB: &str =
    "look at the hub's pods and their log; see docs/reference/runbook.md#kryptonhubnoleader";
const SKEW: &str = "see docs/how-to/upgrade.md#version-skew";
const NO_MEMBER: &str = "add one: docs/how-to/clusters.md#join-a-cluster-through-an-agent";
const TENANTS: &str = "list them with kubectl krypton get tenants -A -o wide; see docs/reference/runbook.md#kryptontenantsfailing";

/// A line for a request without a result.
fn unknown<T>(what: &str, answer: &Answer<T>) -> Line {
    let mark = match answer {
        Answer::NotPermitted(_) => Mark::NotKnown,
        _ => Mark::Wrong,
    };
    let text = match answer.failure() {
        Some(why) => format!("{what} is not known: {why}"),
        None => format!("{what} does not exist"),
    };
    Line::new(mark, text, None)
}

/// CRDs of krypton-operator have no schema version.
fn of_original(name: &str) -> Line {
    let text = format!("the CRD {name} has no schema version of Krypton");
    Line::new(Mark::Note, text, ORIGINAL)
}

pub(super) fn kubernetes(answer: &Answer<Info>) -> Line {
    let info = match answer {
        Answer::Found(info) => info,
        Answer::Failed(why) => {
            let text = format!("the API server does not respond: {why}");
            return Line::new(Mark::Wrong, text, "check that it runs, and your network");
        }
        other => return unknown("the version of Kubernetes", other),
    };
    // Some distributions report a minor version such as `30+`.
    let digits: String = info
        .minor
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let version = &info.git_version;
    match (info.major.as_str(), digits.parse::<u32>()) {
        ("1", Ok(minor)) if minor < MINOR_LEAST => {
            let text = format!("Kubernetes {version} is older than 1.{MINOR_LEAST}");
            Line::new(Mark::Wrong, text, INSTALL)
        }
        _ => Line::new(Mark::Well, format!("Kubernetes {version}"), None),
    }
}

/// `rights`: each resource, and whether the user may create it.
pub(super) fn rights(rights: &[(&str, Answer<bool>)]) -> Line {
    let missing = |(_, answer): &&(&str, Answer<bool>)| *answer == Answer::Found(false);
    let missing: Vec<&str> = rights
        .iter()
        .filter(missing)
        .map(|(name, _)| *name)
        .collect();
    let failed = rights.iter().map(|(_, answer)| answer);
    let mut failed = failed.filter(|answer| !matches!(answer, Answer::Found(_)));
    match (missing.as_slice(), failed.next()) {
        ([], None) => Line::new(Mark::Well, "you may create what the charts contain", None),
        ([], Some(answer)) => unknown("whether you may install the charts", answer),
        (missing, _) => {
            let text = format!("you may not create {}", missing.join(", "));
            Line::new(Mark::Wrong, text, INSTALL)
        }
    }
}

pub(super) fn crds_of_original(crds: &[(String, Answer<CustomResourceDefinition>)]) -> Vec<Line> {
    let found = crds.iter().filter(
        |(_, answer)| matches!(answer, Answer::Found(crd) if schema_version(crd).is_none()),
    );
    found.map(|(name, _)| of_original(name)).collect()
}

pub(super) fn crds(crds: &[(String, Answer<CustomResourceDefinition>)]) -> Vec<Line> {
    let lines: Vec<Line> = crds
        .iter()
        .filter_map(|(name, answer)| crd(name, answer))
        .collect();
    match lines.as_slice() {
        [] => vec![Line::new(
            Mark::Well,
            format!("{} CRDs are served", crds.len()),
            None,
        )],
        _ => lines,
    }
}

/// Returns `None` if the CRD is as it should be.
fn crd(name: &str, answer: &Answer<CustomResourceDefinition>) -> Option<Line> {
    let crd = match answer {
        Answer::Found(crd) => crd,
        Answer::None if name == KryptonDeployment::crd_name() => {
            let text =
                format!("the CRD {name} is missing, so KryptonDeployments are not available");
            return Some(Line::new(Mark::Note, text, CRDS));
        }
        Answer::None => {
            return Some(Line::new(
                Mark::Wrong,
                format!("the CRD {name} is missing"),
                CRDS,
            ));
        }
        Answer::NotPermitted(right) => {
            let text = format!("the CRD {name} is not checked: you may not {right}");
            return Some(Line::new(Mark::Note, text, None));
        }
        failed => return Some(unknown(&format!("the CRD {name}"), failed)),
    };
    if !established(crd) {
        let text = format!("the API server does not serve the CRD {name}");
        return Some(Line::new(Mark::Wrong, text, CRDS));
    }
    match schema_version(crd) {
        None => Some(of_original(name)),
        Some(version) if version < SCHEMA_VERSION => {
            let text = format!(
                "the CRD {name} has schema version {version}, and this program {SCHEMA_VERSION}"
            );
            Some(Line::new(Mark::Note, text, SKEW))
        }
        Some(_) => None,
    }
}

pub(super) fn leader(lease: &Answer<Lease>, namespaces: &[String], now: Timestamp) -> Vec<Line> {
    if *lease == Answer::None {
        let text = format!("no hub runs in the namespace {}", namespaces.join(" or "));
        return vec![Line::new(
            Mark::Wrong,
            text,
            "name the hub's namespace with -n, or install the hub",
        )];
    }
    let mut explainer = Explainer::new(now);
    explainer.lead(lease, namespaces);
    for found in &mut explainer.lines {
        if found.mark == Mark::Wrong {
            found.remedy = Some(HUB.to_owned());
        }
    }
    explainer.lines
}

pub(super) fn hub_version(version: &str) -> Line {
    match version == PROGRAM {
        true => Line::new(Mark::Well, format!("the hub has version {version}"), None),
        false => {
            let text = format!("the hub has version {version}, and this program {PROGRAM}");
            Line::new(Mark::Note, text, SKEW)
        }
    }
}

/// Members without a defect share one line. For the others, only lines that are not well are shown.
pub(super) fn members(
    members: &Result<Vec<Value>, KubectlError>,
    hub: Option<&str>,
    now: Timestamp,
) -> Vec<Line> {
    let members = match members {
        Ok(members) => members,
        Err(error) => {
            let mark = match error.code() {
                Some(403) => Mark::NotKnown,
                _ => Mark::Wrong,
            };
            let text = format!("the members are not known: {error}");
            return vec![Line::new(mark, text, None)];
        }
    };
    if members.is_empty() {
        return vec![Line::new(Mark::Note, "the fleet has no member", NO_MEMBER)];
    }
    let (mut well, mut defects) = (0, Vec::new());
    for object in members {
        let mut lines = member(object, hub, now);
        lines.retain(|line| line.mark != Mark::Well);
        match lines.is_empty() {
            true => well += 1,
            false => defects.push(lines),
        }
    }
    let is_worse = |lines: &Vec<Line>| lines.iter().any(|line| line.mark == Mark::Wrong);
    // Stable, so the members stay in the order of their names.
    defects.sort_by_key(|lines| !is_worse(lines));
    let left = defects.len().saturating_sub(MEMBERS_MOST);
    let mut all = Vec::new();
    if well > 0 {
        let text = format!(
            "{well} of {} members are connected, and up to date",
            members.len()
        );
        all.push(Line::new(Mark::Well, text, None));
    }
    if left > 0 {
        let text = format!("{left} more members have defects; the worst {MEMBERS_MOST} follow");
        all.push(Line::new(
            Mark::Note,
            text,
            "kubectl krypton get clusters -o wide lists them",
        ));
    }
    all.extend(defects.into_iter().take(MEMBERS_MOST).flatten());
    all
}

fn member(object: &Value, hub: Option<&str>, now: Timestamp) -> Vec<Line> {
    let name = text_at(object, "/metadata/name").unwrap_or_default();
    let mut explainer = Explainer::new(now);
    explainer.about(&name);
    let Some(cluster) = decoded::<EdgeCluster>(object) else {
        explainer.advise(
            Mark::Wrong,
            "its EdgeCluster does not match this program's schema",
            SKEW,
        );
        return explainer.lines;
    };
    let (spec, status) = (&cluster.spec, cluster.status.clone().unwrap_or_default());
    let (is_banned, accepted) = (spec.banned, spec.accepted);
    explainer.member(&name, &Answer::Found(cluster));
    if accepted == Some(false) {
        let remedy = format!("kubectl krypton accept {name}");
        explainer.advise(
            Mark::Note,
            "the hub may not connect to it yet",
            remedy.as_str(),
        );
    }
    if let Some(tenants) = status.tenants.filter(|tenants| tenants.error > 0) {
        let text = format!(
            "{} of {} Tenants are in phase Error",
            tenants.error, tenants.total
        );
        explainer.advise(Mark::Note, text, TENANTS);
    }
    if let (Some(agent), Some(hub)) = (&status.agent_version, hub)
        && agent != hub
    {
        let text = format!("its agent has version {agent}, and the hub {hub}");
        explainer.advise(Mark::Note, text, SKEW);
    }
    let mut lines = explainer.lines;
    if is_banned {
        // The ban is intended.
        for line in lines.iter_mut().filter(|line| line.mark != Mark::Well) {
            line.mark = Mark::Note;
        }
    }
    lines
}

#[cfg(test)]
mod tests;

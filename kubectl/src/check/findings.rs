//! Judges what `check` has read. Pure: equal answers produce equal lines.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::version::Info;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::{SCHEMA_VERSION, schema_version};
use krypton_runtime::crd::is_established;
use kube::CustomResourceExt as _;
use serde_json::Value;

use crate::error::KubectlError;
use crate::explain::explanation::Explainer;
use crate::explain::sources::Lookup;
use crate::render::{decode, text_at};
use crate::statement::{Line, Mark};

/// Oldest minor version of Kubernetes 1 whose API servers accept the CRDs.
const MIN_MINOR_VERSION: u32 = 30;
const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Members with a defect that have their own lines.
const MAX_MEMBERS: usize = 20;

const INSTALL_REMEDY: &str = "see docs/how-to/install.md#prerequisites";
const CRD_REMEDY: &str =
    "install the hub's chart, which contains it; see docs/how-to/upgrade.md#crds";
const ORIGINAL_CRD_REMEDY: &str =
    "the hub replaces it and keeps the objects; read docs/how-to/migrate.md before you install it";
const HUB_REMEDY: &str =
    "look at the hub's pods and their log; see docs/reference/runbook.md#kryptonhubnoleader";
const VERSION_SKEW_REMEDY: &str = "see docs/how-to/upgrade.md#version-skew";
const NO_MEMBER_REMEDY: &str = "add one: docs/how-to/clusters.md#join-a-cluster-through-an-agent";
const TENANTS_REMEDY: &str = "list them with kubectl krypton get tenants -A -o wide; see docs/reference/runbook.md#kryptontenantsfailing";

/// A line for a request without a result.
fn unknown_line<T>(subject: &str, lookup: &Lookup<T>) -> Line {
    let mark = match lookup {
        Lookup::NotPermitted(_) => Mark::Unknown,
        _ => Mark::Problem,
    };
    let text = match lookup.failure() {
        Some(reason) => format!("{subject} is not known: {reason}"),
        None => format!("{subject} does not exist"),
    };
    Line::new(mark, text, None)
}

/// CRDs of krypton-operator have no schema version.
fn original_crd_line(name: &str) -> Line {
    let text = format!("the CRD {name} has no schema version of Krypton");
    Line::new(Mark::Note, text, ORIGINAL_CRD_REMEDY)
}

pub(super) fn kubernetes(lookup: &Lookup<Info>) -> Line {
    let info = match lookup {
        Lookup::Found(info) => info,
        Lookup::Failed(reason) => {
            let text = format!("the API server does not respond: {reason}");
            return Line::new(Mark::Problem, text, "check that it runs, and your network");
        }
        failure => return unknown_line("the version of Kubernetes", failure),
    };
    // Some distributions report a minor version such as `30+`.
    let digits: String = info
        .minor
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let version = &info.git_version;
    match (info.major.as_str(), digits.parse::<u32>()) {
        ("1", Ok(minor)) if minor < MIN_MINOR_VERSION => {
            let text = format!("Kubernetes {version} is older than 1.{MIN_MINOR_VERSION}");
            Line::new(Mark::Problem, text, INSTALL_REMEDY)
        }
        _ => Line::new(Mark::Ok, format!("Kubernetes {version}"), None),
    }
}

/// `rights`: each resource, and whether the user may create it.
pub(super) fn rights(rights: &[(&str, Lookup<bool>)]) -> Line {
    let missing = |(_, lookup): &&(&str, Lookup<bool>)| *lookup == Lookup::Found(false);
    let missing: Vec<&str> = rights
        .iter()
        .filter(missing)
        .map(|(name, _)| *name)
        .collect();
    let failures = rights.iter().map(|(_, lookup)| lookup);
    let mut failures = failures.filter(|lookup| !matches!(lookup, Lookup::Found(_)));
    match (missing.as_slice(), failures.next()) {
        ([], None) => Line::new(Mark::Ok, "you may create what the charts contain", None),
        ([], Some(lookup)) => unknown_line("whether you may install the charts", lookup),
        (missing, _) => {
            let text = format!("you may not create {}", missing.join(", "));
            Line::new(Mark::Problem, text, INSTALL_REMEDY)
        }
    }
}

pub(super) fn crds_of_original(crds: &[(String, Lookup<CustomResourceDefinition>)]) -> Vec<Line> {
    let originals = crds.iter().filter(
        |(_, lookup)| matches!(lookup, Lookup::Found(crd) if schema_version(crd).is_none()),
    );
    originals.map(|(name, _)| original_crd_line(name)).collect()
}

pub(super) fn crds(crds: &[(String, Lookup<CustomResourceDefinition>)]) -> Vec<Line> {
    let lines: Vec<Line> = crds
        .iter()
        .filter_map(|(name, lookup)| crd(name, lookup))
        .collect();
    match lines.as_slice() {
        [] => vec![Line::new(
            Mark::Ok,
            format!("{} CRDs are served", crds.len()),
            None,
        )],
        _ => lines,
    }
}

/// Returns `None` if the CRD is as it should be.
fn crd(name: &str, lookup: &Lookup<CustomResourceDefinition>) -> Option<Line> {
    let crd = match lookup {
        Lookup::Found(crd) => crd,
        Lookup::NotFound if name == KryptonDeployment::crd_name() => {
            let text =
                format!("the CRD {name} is missing, so KryptonDeployments are not available");
            return Some(Line::new(Mark::Note, text, CRD_REMEDY));
        }
        Lookup::NotFound => {
            return Some(Line::new(
                Mark::Problem,
                format!("the CRD {name} is missing"),
                CRD_REMEDY,
            ));
        }
        Lookup::NotPermitted(permission) => {
            let text = format!("the CRD {name} is not checked: you may not {permission}");
            return Some(Line::new(Mark::Note, text, None));
        }
        failure => return Some(unknown_line(&format!("the CRD {name}"), failure)),
    };
    if !is_established(crd) {
        let text = format!("the API server does not serve the CRD {name}");
        return Some(Line::new(Mark::Problem, text, CRD_REMEDY));
    }
    match schema_version(crd) {
        None => Some(original_crd_line(name)),
        Some(version) if version < SCHEMA_VERSION => {
            let text = format!(
                "the CRD {name} has schema version {version}, and this program {SCHEMA_VERSION}"
            );
            Some(Line::new(Mark::Note, text, VERSION_SKEW_REMEDY))
        }
        Some(_) => None,
    }
}

pub(super) fn leader(lease: &Lookup<Lease>, namespaces: &[String], now: Timestamp) -> Vec<Line> {
    if *lease == Lookup::NotFound {
        let text = format!("no hub runs in the namespace {}", namespaces.join(" or "));
        return vec![Line::new(
            Mark::Problem,
            text,
            "name the hub's namespace with -n, or install the hub",
        )];
    }
    let mut explainer = Explainer::new(now);
    explainer.explain_leader(lease, namespaces);
    for line in &mut explainer.lines {
        if line.mark == Mark::Problem {
            line.remedy = Some(HUB_REMEDY.to_owned());
        }
    }
    explainer.lines
}

pub(super) fn hub_version(version: &str) -> Line {
    match version == PROGRAM_VERSION {
        true => Line::new(Mark::Ok, format!("the hub has version {version}"), None),
        false => {
            let text = format!("the hub has version {version}, and this program {PROGRAM_VERSION}");
            Line::new(Mark::Note, text, VERSION_SKEW_REMEDY)
        }
    }
}

/// Members without a defect share one line. For the others, only lines that are not well are shown.
pub(super) fn members(
    members: &Result<Vec<Value>, KubectlError>,
    hub_version: Option<&str>,
    now: Timestamp,
) -> Vec<Line> {
    let members = match members {
        Ok(members) => members,
        Err(error) => {
            let mark = match error.code() {
                Some(403) => Mark::Unknown,
                _ => Mark::Problem,
            };
            let text = format!("the members are not known: {error}");
            return vec![Line::new(mark, text, None)];
        }
    };
    if members.is_empty() {
        return vec![Line::new(
            Mark::Note,
            "the fleet has no member",
            NO_MEMBER_REMEDY,
        )];
    }
    let (mut healthy, mut defects) = (0, Vec::new());
    for object in members {
        let mut lines = member(object, hub_version, now);
        lines.retain(|line| line.mark != Mark::Ok);
        match lines.is_empty() {
            true => healthy += 1,
            false => defects.push(lines),
        }
    }
    let has_problem = |lines: &Vec<Line>| lines.iter().any(|line| line.mark == Mark::Problem);
    // Stable, so the members stay in the order of their names.
    defects.sort_by_key(|lines| !has_problem(lines));
    let omitted = defects.len().saturating_sub(MAX_MEMBERS);
    let mut lines = Vec::new();
    if healthy > 0 {
        let text = format!(
            "{healthy} of {} members are connected, and up to date",
            members.len()
        );
        lines.push(Line::new(Mark::Ok, text, None));
    }
    if omitted > 0 {
        let text = format!("{omitted} more members have defects; the worst {MAX_MEMBERS} follow");
        lines.push(Line::new(
            Mark::Note,
            text,
            "kubectl krypton get clusters -o wide lists them",
        ));
    }
    lines.extend(defects.into_iter().take(MAX_MEMBERS).flatten());
    lines
}

fn member(object: &Value, hub_version: Option<&str>, now: Timestamp) -> Vec<Line> {
    let name = text_at(object, "/metadata/name").unwrap_or_default();
    let mut explainer = Explainer::new(now);
    explainer.set_member(&name);
    let Some(cluster) = decode::<EdgeCluster>(object) else {
        explainer.add_with_remedy(
            Mark::Problem,
            "its EdgeCluster does not match this program's schema",
            VERSION_SKEW_REMEDY,
        );
        return explainer.lines;
    };
    let (spec, status) = (&cluster.spec, cluster.status.clone().unwrap_or_default());
    let (is_banned, accepted) = (spec.banned, spec.accepted);
    explainer.explain_member(&name, &Lookup::Found(cluster));
    if accepted == Some(false) {
        let remedy = format!("kubectl krypton accept {name}");
        explainer.add_with_remedy(
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
        explainer.add_with_remedy(Mark::Note, text, TENANTS_REMEDY);
    }
    if let (Some(agent_version), Some(hub_version)) = (&status.agent_version, hub_version)
        && agent_version != hub_version
    {
        let text = format!("its agent has version {agent_version}, and the hub {hub_version}");
        explainer.add_with_remedy(Mark::Note, text, VERSION_SKEW_REMEDY);
    }
    let mut lines = explainer.lines;
    if is_banned {
        // The ban is intended.
        for line in lines.iter_mut().filter(|line| line.mark != Mark::Ok) {
            line.mark = Mark::Note;
        }
    }
    lines
}

#[cfg(test)]
mod tests;

//! Judges what `check` has read. Pure: equal answers produce equal lines.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::version::Info;
use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterStatus, TenantCounts};
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::{SCHEMA_VERSION, schema_version};
use krypton_runtime::crd::is_established;
use krypton_types::conditions::CLOCK_SYNCHRONIZED;
use krypton_types::validity::{CredentialState, Validity};
use kube::CustomResourceExt as _;
use serde_json::Value;

use super::clock::ahead_of_leader;
use crate::error::KubectlError;
use crate::explain::explanation::Explainer;
use crate::explain::sources::Lookup;
use crate::program::unready_cause;
use crate::render::{age, decode, list_at, text_at};
use crate::statement::{Line, Mark, NextStep};

/// Oldest minor version of Kubernetes 1 whose API servers accept the CRDs.
const MIN_MINOR_VERSION: u32 = 30;
const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");
/// Members with a defect that have their own lines.
const MAX_MEMBERS: usize = 20;
/// Reasons of failing Tenants in the line of a member.
const MAX_REASONS: usize = 3;

/// Largest difference of two clocks that is harmless.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(2);
/// Largest difference of two clocks that does not fail the check.
const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_secs(30);
/// Age in seconds up to which a restart is shown.
const RECENT_RESTART: i64 = 60 * 60;

const HUB_REMEDY: &str = "look at the hub's pods and their log";

const API_SERVER: NextStep<'static> = (
    "check that the API server runs, your network, and --context",
    "reference/kubectl.md#commands",
);
const PERMISSION: NextStep<'static> = (
    "ask an administrator of the cluster for this right",
    "reference/kubectl.md#permissions",
);
const OLD_KUBERNETES: NextStep<'static> =
    ("upgrade the cluster", "how-to/install.md#prerequisites");
const INSTALL_RIGHTS: NextStep<'static> = (
    "ask an administrator of the cluster for these rights",
    "how-to/install.md#prerequisites",
);
const CLOCK: NextStep<'static> = (
    "synchronize both clocks, as the validity of tokens and certificates depends on them",
    "reference/kubectl/check.md#clocks",
);
const CRD: NextStep<'static> = (
    "install the hub's chart, which contains it",
    "how-to/upgrade.md#crds",
);
const OLD_CRD: NextStep<'static> = (
    "upgrade the hub, which updates the CRD",
    "how-to/upgrade.md#crds",
);
const ORIGINAL_CRD: NextStep<'static> = (
    "the hub replaces it and keeps the objects; read the page before you install the hub",
    "how-to/migrate.md#steps",
);
const NO_HUB: NextStep<'static> = (
    "name the hub's namespace with --hub-namespace, or install the hub",
    "how-to/install.md#install-the-hub",
);
const LEADER: NextStep<'static> = (HUB_REMEDY, "reference/runbook.md#kryptonhubnoleader");
const UNREADY_POD: NextStep<'static> = (HUB_REMEDY, "reference/runbook.md#kryptonhubdown");
const RESTARTED_POD: NextStep<'static> = (HUB_REMEDY, "reference/runbook.md#kryptonhubrestarts");
const EXPIRED_AUTHORITY: NextStep<'static> = (
    "delete Secret krypton-hub-ca and restart the hub for a new CA; each agent must join again",
    "how-to/rotate-ca.md#replace-an-expired-ca",
);
const ADDRESS: NextStep<'static> = (
    "if clusters join through an agent, set advertise in the values of the hub's chart",
    "how-to/install.md#install-the-hub",
);
const VERSIONS: NextStep<'static> = (
    "upgrade the older of the two",
    "how-to/upgrade.md#version-skew",
);
const OTHER_SCHEMA: NextStep<'static> = (
    "use this program in the version of the hub",
    "how-to/upgrade.md#version-skew",
);
const NO_MEMBER: NextStep<'static> = (
    "add one: kubectl krypton join NAME",
    "how-to/clusters.md#join-a-cluster-through-an-agent",
);
const OMITTED_MEMBERS: NextStep<'static> = (
    "kubectl krypton get clusters -o wide lists them",
    MEMBER_DOCS,
);
const FAILING_TENANTS: NextStep<'static> = (
    "list them with kubectl krypton get tenants --fleet --not-ready",
    "reference/runbook.md#kryptontenantsfailing",
);

const RIGHTS_DOCS: &str = "reference/rbac.md#hub-only";
const AUTHORITY_DOCS: &str = "how-to/rotate-ca.md#rotate-the-ca";
const ACCEPTANCE_DOCS: &str = "reference/members.md#acceptance";
const MEMBER_DOCS: &str = "reference/reasons.md#edgecluster-reasons";

/// A line for a request without a result.
pub(super) fn unknown_line<T>(subject: &str, lookup: &Lookup<T>) -> Line {
    let (mark, step) = match lookup {
        Lookup::NotPermitted(_) => (Mark::Unknown, PERMISSION),
        _ => (Mark::Problem, API_SERVER),
    };
    let text = match lookup.failure() {
        Some(reason) => format!("{subject} is not known: {reason}"),
        None => format!("{subject} does not exist"),
    };
    Line::defect(mark, text, step)
}

/// A line for a failed list. Its mark is the first if the user may not list the objects, otherwise the second.
fn failed_line(text: String, error: &KubectlError, marks: [Mark; 2]) -> Line {
    let [not_permitted, failed] = marks;
    match error.code() {
        Some(403) => Line::defect(not_permitted, text, PERMISSION),
        _ => Line::defect(failed, text, API_SERVER),
    }
}

/// CRDs of krypton-operator have no schema version.
fn original_crd_line(name: &str) -> Line {
    let text = format!("the CRD {name} has no schema version of Krypton");
    Line::defect(Mark::Note, text, ORIGINAL_CRD)
}

pub(super) fn kubernetes(lookup: &Lookup<Info>) -> Line {
    let info = match lookup {
        Lookup::Found(info) => info,
        Lookup::Failed(reason) => {
            let text = format!("the API server does not respond: {reason}");
            return Line::defect(Mark::Problem, text, API_SERVER);
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
            Line::defect(Mark::Problem, text, OLD_KUBERNETES)
        }
        _ => Line::ok(format!("Kubernetes {version}")),
    }
}

/// `ahead`: how far the clock of the API server is ahead of that of `other`.
pub(super) fn clock(ahead: SignedDuration, other: &str) -> Line {
    let difference = ahead.unsigned_abs();
    if difference <= CLOCK_DIFFERENCE {
        return Line::ok(format!("the clocks of the API server and of {other} agree"));
    }
    let mark = match difference <= MAX_CLOCK_DIFFERENCE {
        true => Mark::Note,
        false => Mark::Problem,
    };
    let direction = match ahead.is_positive() {
        true => "ahead of",
        false => "behind",
    };
    let text = format!(
        "the clock of the API server is {} s {direction} that of {other}",
        difference.as_secs()
    );
    Line::defect(mark, text, CLOCK)
}

/// Returns the names of the missing rights, and the first review without a result.
fn judge_rights<N: AsRef<str>>(rights: &[(N, Lookup<bool>)]) -> (Vec<&str>, Option<&Lookup<bool>>) {
    let missing = rights
        .iter()
        .filter(|(_, lookup)| *lookup == Lookup::Found(false));
    let missing = missing.map(|(name, _)| name.as_ref()).collect();
    let mut lookups = rights.iter().map(|(_, lookup)| lookup);
    let failure = lookups.find(|lookup| !matches!(lookup, Lookup::Found(_)));
    (missing, failure)
}

/// `rights`: each resource, and whether the user may create it.
pub(super) fn rights(rights: &[(&str, Lookup<bool>)]) -> Line {
    match judge_rights(rights) {
        (missing, _) if !missing.is_empty() => {
            let text = format!("you may not create {}", missing.join(", "));
            Line::defect(Mark::Problem, text, INSTALL_RIGHTS)
        }
        (_, Some(lookup)) => unknown_line("whether you may install the charts", lookup),
        (_, None) => Line::ok("you may create what the charts contain"),
    }
}

/// `rights`: each right that the hub's account needs, and whether it has it.
pub(super) fn hub_rights(
    (namespace, account): (&str, &str),
    rights: &[(String, Lookup<bool>)],
) -> Line {
    let account = format!("{namespace}/{account}");
    match judge_rights(rights) {
        (missing, _) if !missing.is_empty() => {
            let missing = missing.join(", ");
            let text = format!("the hub's account {account} may not {missing}");
            let remedy = format!(
                "install its roles again: kubectl krypton install hub --hub-namespace {namespace}"
            );
            Line::defect(Mark::Problem, text, (&remedy, RIGHTS_DOCS))
        }
        (_, Some(Lookup::NotPermitted(permission))) => {
            let text = format!("the hub's rights are not checked: you may not {permission}");
            Line::defect(Mark::Note, text, PERMISSION)
        }
        (_, Some(lookup)) => unknown_line("whether the hub has its rights", lookup),
        (_, None) => Line::ok(format!("the hub's account {account} has its rights")),
    }
}

pub(super) fn crds_of_original(crds: &[(String, Lookup<CustomResourceDefinition>)]) -> Vec<Line> {
    let originals = crds.iter().filter(|(_, lookup)| {
        matches!(lookup, Lookup::Found(crd) if schema_version(&crd.metadata).is_none())
    });
    originals.map(|(name, _)| original_crd_line(name)).collect()
}

pub(super) fn crds(crds: &[(String, Lookup<CustomResourceDefinition>)]) -> Vec<Line> {
    let lines: Vec<Line> = crds
        .iter()
        .filter_map(|(name, lookup)| crd(name, lookup))
        .collect();
    match lines.as_slice() {
        [] => vec![Line::ok(format!("{} CRDs are served", crds.len()))],
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
            return Some(Line::defect(Mark::Note, text, CRD));
        }
        Lookup::NotFound => {
            let text = format!("the CRD {name} is missing");
            return Some(Line::defect(Mark::Problem, text, CRD));
        }
        Lookup::NotPermitted(permission) => {
            let text = format!("the CRD {name} is not checked: you may not {permission}");
            return Some(Line::defect(Mark::Note, text, PERMISSION));
        }
        failure => return Some(unknown_line(&format!("the CRD {name}"), failure)),
    };
    if !is_established(crd) {
        let text = format!("the API server does not serve the CRD {name}");
        return Some(Line::defect(Mark::Problem, text, CRD));
    }
    match schema_version(&crd.metadata) {
        None => Some(original_crd_line(name)),
        Some(version) if version < SCHEMA_VERSION => {
            let text = format!(
                "the CRD {name} has schema version {version}, and this program {SCHEMA_VERSION}"
            );
            Some(Line::defect(Mark::Note, text, OLD_CRD))
        }
        Some(_) => None,
    }
}

/// Judges the leader and its clock.
pub(super) fn leader(lookup: &Lookup<Lease>, namespaces: &[String], now: Timestamp) -> Vec<Line> {
    let lease = match lookup {
        Lookup::Found(lease) => lease,
        Lookup::NotFound => {
            let text = format!("no hub runs in the namespace {}", namespaces.join(" or "));
            return vec![Line::defect(Mark::Problem, text, NO_HUB)];
        }
        failure => return vec![unknown_line("the leader of the hubs", failure)],
    };
    let mut explainer = Explainer::new(now);
    explainer.explain_leader(lookup, namespaces);
    let lines = explainer.lines.into_iter();
    let clock = ahead_of_leader(lease).map(|ahead| clock(ahead, "the leading hub"));
    lines
        .map(|line| line.with_step(LEADER))
        .chain(clock)
        .collect()
}

/// `hub_pods`: the namespace with the hub's pods, and these pods. `None` if the hub runs elsewhere. The leader's line
/// shows whether it runs.
pub(super) fn pods(
    hub_pods: &Result<Option<(String, Vec<Value>)>, KubectlError>,
    now: Timestamp,
) -> Vec<Line> {
    let (namespace, pods) = match hub_pods {
        Ok(Some((namespace, pods))) => (namespace, pods),
        Ok(None) => return Vec::new(),
        Err(error) => {
            let text = format!("the hub's pods are not checked: {error}");
            return vec![failed_line(text, error, [Mark::Note, Mark::Unknown])];
        }
    };
    let is_current = |pod: &&Value| pod.pointer("/metadata/deletionTimestamp").is_none();
    let pods: Vec<&Value> = pods.iter().filter(is_current).collect();
    let ready = pods.iter().filter(|pod| is_true(pod, "Ready")).count();
    let mut lines = Vec::new();
    if ready > 0 {
        let text = format!("{ready} of {} pods of the hub are Ready", pods.len());
        lines.push(Line::ok(text));
    }
    for pod in pods {
        lines.extend(pod_defect(namespace, pod, now));
    }
    lines
}

/// Returns `None` if the pod is Ready and has not restarted recently.
fn pod_defect(namespace: &str, pod: &Value, now: Timestamp) -> Option<Line> {
    let name = text_at(pod, "/metadata/name").unwrap_or_default();
    let pod_name = format!("the pod {namespace}/{name}");
    Some(match (is_true(pod, "Ready"), recent_restart(pod, now)) {
        (true, None) => return None,
        (true, Some(restart)) => {
            let text = format!("{pod_name} has {restart}");
            Line::defect(Mark::Note, text, RESTARTED_POD)
        }
        (false, restart) => {
            let restart = restart.map(|restart| format!("it has {restart}"));
            let causes: Vec<String> = unready_cause(pod).into_iter().chain(restart).collect();
            let text = match causes.as_slice() {
                [] => format!("{pod_name} is not Ready"),
                causes => format!("{pod_name} is not Ready: {}", causes.join("; ")),
            };
            Line::defect(Mark::Problem, text, UNREADY_POD)
        }
    })
}

/// Returns whether the object has this condition, and it is True.
fn is_true(object: &Value, type_: &str) -> bool {
    list_at(object, "/status/conditions")
        .any(|condition| condition["type"] == type_ && condition["status"] == "True")
}

/// Describes the last restart of a container, if it was recent.
fn recent_restart(pod: &Value, now: Timestamp) -> Option<String> {
    list_at(pod, "/status/containerStatuses").find_map(|status| {
        let ended = status.pointer("/lastState/terminated")?;
        let at: Timestamp = ended.get("finishedAt")?.as_str()?.parse().ok()?;
        let is_recent = now.as_second() - at.as_second() <= RECENT_RESTART;
        let restarts = status.get("restartCount").and_then(Value::as_i64)?;
        let reason = text_at(ended, "/reason").unwrap_or_default();
        is_recent.then(|| {
            format!(
                "restarted {restarts} times, last {} ago: {reason}, exit code {}",
                age(at, now),
                ended["exitCode"]
            )
        })
    })
}

/// `roots`: the root that signs certificates, and during a rotation the next one.
pub(super) fn authority(roots: &[Validity], now: Timestamp) -> Option<Line> {
    let (signing, next) = roots.split_first()?;
    let end = signing.not_after;
    let remedy = match next.is_empty() {
        true => "kubectl krypton rotate-ca",
        false => "see what the rotation waits for: kubectl krypton rotate-ca --status",
    };
    Some(match signing.state_at(now) {
        CredentialState::Current => Line::ok(format!("the hub's CA is valid until {end}")),
        CredentialState::Soon => {
            let text = format!("the hub's CA expires at {end}");
            Line::defect(Mark::Note, text, (remedy, AUTHORITY_DOCS))
        }
        CredentialState::Expired => {
            let text = format!("the hub's CA expired at {end}, so no agent can connect");
            Line::defect(Mark::Problem, text, EXPIRED_AUTHORITY)
        }
    })
}

/// Returns a line if the hub advertises no address to agents.
pub(super) fn addresses(addresses: &[String]) -> Option<Line> {
    let text = "the hub advertises no address, so kubectl krypton join needs --address";
    let line = Line::defect(Mark::Note, text, ADDRESS);
    addresses.is_empty().then_some(line)
}

pub(super) fn hub_version(version: &str) -> Line {
    match version == PROGRAM_VERSION {
        true => Line::ok(format!("the hub has version {version}")),
        false => {
            let text = format!("the hub has version {version}, and this program {PROGRAM_VERSION}");
            Line::defect(Mark::Note, text, VERSIONS)
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
            let text = format!("the members are not known: {error}");
            return vec![failed_line(text, error, [Mark::Unknown, Mark::Problem])];
        }
    };
    if members.is_empty() {
        let text = "the fleet has no member";
        return vec![Line::defect(Mark::Note, text, NO_MEMBER)];
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
    let has = |lines: &[Line], mark| lines.iter().any(|line| line.mark == mark);
    // Stable, so the members stay in the order of their names. Defects that fail the check come first.
    defects.sort_by_key(|lines| (!has(lines, Mark::Problem), !has(lines, Mark::Unknown)));
    let omitted = defects.len().saturating_sub(MAX_MEMBERS);
    let mut lines = Vec::new();
    if healthy > 0 {
        let total = members.len();
        let text = format!("{healthy} of {total} members are connected, and up to date");
        lines.push(Line::ok(text));
    }
    lines.extend(agent_clocks(members));
    if omitted > 0 {
        let text = format!("{omitted} more members have defects; the worst {MAX_MEMBERS} follow");
        lines.push(Line::defect(Mark::Note, text, OMITTED_MEMBERS));
    }
    lines.extend(defects.into_iter().take(MAX_MEMBERS).flatten());
    lines
}

/// Counts the agents whose clock agreed with the hub's when they connected. A member whose clock differs has its own
/// line. An agent that has not connected to the leading hub yet has no condition.
fn agent_clocks(members: &[Value]) -> Option<Line> {
    let is_agent = |member: &&Value| text_at(member, "/status/mode").as_deref() == Some("agent");
    let agents: Vec<&Value> = members.iter().filter(is_agent).collect();
    let agrees = |agent: &&&Value| is_true(agent, CLOCK_SYNCHRONIZED);
    let (agreeing, total) = (agents.iter().filter(agrees).count(), agents.len());
    let text = format!("the clocks of {agreeing} of {total} agents agree with the hub's");
    (agreeing > 0).then(|| Line::ok(text))
}

/// Returns the first reasons of the Tenants in phase Error, as the end of a line.
fn error_reasons(status: &EdgeClusterStatus) -> String {
    let summaries = status.tenant_summaries.iter().flat_map(|it| &it.tenants);
    let failing = summaries.filter(|tenant| tenant.state == "Error");
    let reasons: BTreeSet<&str> = failing.map(|tenant| tenant.reason.as_str()).collect();
    let omitted = if reasons.len() > MAX_REASONS {
        ", …"
    } else {
        ""
    };
    let shown: Vec<&str> = reasons.into_iter().take(MAX_REASONS).collect();
    match shown.is_empty() {
        true => String::new(),
        false => format!(": {}{omitted}", shown.join(", ")),
    }
}

fn member(object: &Value, hub_version: Option<&str>, now: Timestamp) -> Vec<Line> {
    let name = text_at(object, "/metadata/name").unwrap_or_default();
    let mut explainer = Explainer::new(now);
    explainer.set_member(&name);
    let Some(cluster) = decode::<EdgeCluster>(object) else {
        let text = "its EdgeCluster does not match this program's schema";
        let line = Line::defect(Mark::Problem, text, OTHER_SCHEMA);
        return vec![line.of_member(&name)];
    };
    let status = cluster.status.clone().unwrap_or_default();
    let (is_banned, accepted) = (cluster.spec.banned, cluster.spec.accepted);
    explainer.explain_member(&name, &Lookup::Found(cluster));
    let explain = format!("kubectl krypton explain cluster {name}");
    let lines = explainer.lines.into_iter();
    let lines = lines.map(|line| line.with_step((&explain, MEMBER_DOCS)));
    let mut lines: Vec<Line> = lines.collect();
    let mut warn = |text: &str, step: NextStep<'_>| {
        lines.push(Line::defect(Mark::Note, text, step).of_member(&name));
    };
    if accepted == Some(false) {
        let remedy = format!("kubectl krypton accept {name}");
        let text = "the hub may not connect to it yet";
        warn(text, (&remedy, ACCEPTANCE_DOCS));
    }
    if let Some(TenantCounts { total, error, .. }) = status.tenants.filter(|it| it.error > 0) {
        let reasons = error_reasons(&status);
        let text = format!("{error} of {total} Tenants are in phase Error{reasons}");
        warn(&text, FAILING_TENANTS);
    }
    if let (Some(agent_version), Some(hub_version)) = (&status.agent_version, hub_version)
        && agent_version != hub_version
    {
        let text = format!("its agent has version {agent_version}, and the hub {hub_version}");
        warn(&text, VERSIONS);
    }
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

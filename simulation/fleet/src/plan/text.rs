//! The text form of plans: one line for each setting and each step.

use std::fmt;
use std::str::FromStr;

use super::{
    Access, Action, Chart, DeploymentAction, Edge, FOREVER, LinkFault, MemberAction, Plan,
    PlanStep, PlannedTenant, RequestFault, Scope, ServerFault, Settings, TenantAction,
};
use crate::conductor::Millis;

/// A line that is not part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a line of a plan")]
pub struct ParseError(String);

/// Names of the faults of API servers.
const SERVER_FAULTS: [(&str, ServerFault); 14] = [
    ("down", ServerFault::Down),
    ("hangs", ServerFault::Hangs),
    ("429", ServerFault::TooManyRequests),
    ("500", ServerFault::InternalError),
    ("503", ServerFault::Unavailable),
    ("html", ServerFault::Html),
    ("401", ServerFault::Unauthorized),
    ("403", ServerFault::Forbidden),
    ("404", ServerFault::NotFound),
    ("410", ServerFault::Gone),
    ("502", ServerFault::BadGateway),
    ("empty", ServerFault::EmptyLists),
    ("cut", ServerFault::CutBodies),
    ("failing-jobs", ServerFault::FailingJobs),
];
const CHARTS: [(&str, Chart); 4] = [
    ("plain", Chart::Plain),
    ("hooks", Chart::Hooks),
    ("failing-upgrade", Chart::FailingUpgrade),
    ("slow", Chart::Slow),
];

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}", self.seed)?;
        write!(f, "{}", self.settings)?;
        for step in &self.steps {
            writeln!(f, "{} {}", Seconds(step.at), step.action)?;
        }
        Ok(())
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "hubs {}", self.hubs)?;
        write!(f, "edges")?;
        for edge in &self.edges {
            let access = match edge.access {
                Access::Agent => "agent",
                Access::Kubeconfig => "kubeconfig",
                Access::Both => "both",
            };
            write!(f, " {}:{access}", edge.name)?;
        }
        write!(f, "\ntenants")?;
        for tenant in &self.tenants {
            write!(f, " {}@{}", tenant.name, tenant.cluster)?;
            if let Some(member) = &tenant.placed_on {
                write!(f, ":{member}")?;
            }
        }
        let self_cluster = if self.self_cluster { "yes" } else { "no" };
        writeln!(f, "\nself-cluster {self_cluster}")?;
        writeln!(f, "chaos {}", Seconds(self.chaos))?;
        writeln!(f, "quiet {}", Seconds(self.quiet))?;
        writeln!(f, "chart {}", name_for(&CHARTS, self.chart))?;
        match &self.at_start {
            Some(action) => writeln!(f, "at-start {action}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant {
                cluster,
                tenant,
                action,
            } => write!(f, "tenant {cluster}/{tenant} {action}"),
            Self::Member { member, action } => write!(f, "member {member} {action}"),
            Self::Deployment { name, action } => write!(f, "deployment {name} {action}"),
            Self::ChartVersion { version } => write!(f, "chart-version {version}"),
            Self::Values { number } => write!(f, "values {number}"),
            Self::RotateCa => f.write_str("rotate-ca"),
            Self::PassDays { days } => write!(f, "pass-days {days}"),
            Self::DeleteCrd { cluster } => write!(f, "delete-crd {cluster}"),
            Self::DeleteHomeCrd { resource } => write!(f, "delete-home-crd {resource}"),
            Self::DeleteAnchor { cluster } => write!(f, "delete-anchor {cluster}"),
            Self::Crash { host, restart } => {
                write!(f, "crash {host} restart {}", Seconds(*restart))
            }
            Self::AtRequest { host, nth, fault } => match fault {
                RequestFault::Crash { restart } => {
                    let restart = Seconds(*restart);
                    write!(f, "crash {host} at-request {nth} restart {restart}")
                }
                RequestFault::Fail => write!(f, "fail {host} at-request {nth}"),
                RequestFault::LoseResponse => write!(f, "lose-answer {host} at-request {nth}"),
            },
            Self::Stop { host, length } => write!(f, "stop {host} for {}", Seconds(*length)),
            Self::Freeze { host, length } => write!(f, "freeze {host} for {}", Seconds(*length)),
            Self::Suspend { host, length } => write!(f, "suspend {host} for {}", Seconds(*length)),
            Self::CopyAgent { edge, length } => {
                write!(f, "copy-agent {edge} for {}", Seconds(*length))
            }
            Self::HostileAgent { edge, length } => {
                write!(f, "hostile-agent {edge} for {}", Seconds(*length))
            }
            Self::Skew { host, by } => write!(f, "skew {host} by {}", SignedSeconds(*by)),
            Self::Link {
                from,
                to,
                bidirectional,
                fault,
                length,
            } => {
                let arrow = if *bidirectional { "<->" } else { "->" };
                let length = Seconds(*length);
                write!(f, "link {from} {arrow} {to} {fault} for {length}")
            }
            Self::HalfOpen { from, to } => write!(f, "half-open {from} -> {to}"),
            Self::Server {
                cluster,
                fault,
                scope,
                length,
            } => {
                let fault = name_for(&SERVER_FAULTS, *fault);
                let length = Seconds(*length);
                write!(f, "server {cluster} {fault}{scope} for {length}")
            }
            Self::EndWatches { cluster } => write!(f, "end-watches {cluster}"),
            Self::Compact { cluster } => write!(f, "compact {cluster}"),
            Self::Restore { cluster, after } => {
                write!(f, "restore {cluster} after {}", Seconds(*after))
            }
            Self::ServerClock {
                cluster,
                by,
                length,
            } => {
                let (by, length) = (SignedSeconds(*by), Seconds(*length));
                write!(f, "server-clock {cluster} by {by} for {length}")
            }
        }
    }
}

impl fmt::Display for TenantAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create { placed_on: None } => f.write_str("create"),
            Self::Create {
                placed_on: Some(member),
            } => write!(f, "create on {member}"),
            Self::Edit { number } => write!(f, "edit {number}"),
            Self::Delete => f.write_str("delete"),
            Self::Orphan => f.write_str("orphan"),
            Self::Relabel { number } => write!(f, "relabel {number}"),
            Self::Pause => f.write_str("pause"),
            Self::Resume => f.write_str("resume"),
            Self::Retry { number } => write!(f, "retry {number}"),
            Self::AddForeign => f.write_str("add-foreign"),
            Self::RemoveForeign => f.write_str("remove-foreign"),
            Self::DeleteRelease => f.write_str("delete-release"),
            Self::DamageRelease => f.write_str("damage-release"),
            Self::ForgeRelease => f.write_str("forge-release"),
            Self::DeleteNamespace => f.write_str("delete-namespace"),
            Self::DeleteObject => f.write_str("delete-object"),
            Self::AddOccupant => f.write_str("add-occupant"),
            Self::SetClusterRef { member } => write!(f, "name {member}"),
            Self::Rewrite { member } => write!(f, "rewrite naming {member}"),
            Self::Adopt => f.write_str("adopt"),
        }
    }
}

impl fmt::Display for MemberAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pause => f.write_str("pause"),
            Self::Resume => f.write_str("resume"),
            Self::Ban => f.write_str("ban"),
            Self::Unban => f.write_str("unban"),
            Self::Delete { uninstall: true } => f.write_str("delete uninstall"),
            Self::Delete { uninstall: false } => f.write_str("delete retain"),
            Self::Policy { uninstall: true } => f.write_str("policy uninstall"),
            Self::Policy { uninstall: false } => f.write_str("policy retain"),
            Self::Orphan => f.write_str("orphan"),
            Self::Allow { namespace: None } => f.write_str("allow-all"),
            Self::Allow {
                namespace: Some(namespace),
            } => write!(f, "allow {namespace}"),
            Self::Rebuild => f.write_str("rebuild"),
            Self::Replace => f.write_str("replace"),
            Self::Rejoin => f.write_str("rejoin"),
            Self::AddTwin { length } => write!(f, "add-twin for {}", Seconds(*length)),
            Self::AddElsewhere { length } => {
                write!(f, "add-elsewhere for {}", Seconds(*length))
            }
            Self::DamageKubeconfig { length } => {
                write!(f, "damage-kubeconfig for {}", Seconds(*length))
            }
            Self::DeleteKubeconfig { length } => {
                write!(f, "delete-kubeconfig for {}", Seconds(*length))
            }
            Self::RelabelKubeconfig { length } => {
                write!(f, "relabel-kubeconfig for {}", Seconds(*length))
            }
        }
    }
}

impl fmt::Display for DeploymentAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create { region } => write!(f, "create in {region}"),
            Self::Edit { number } => write!(f, "edit {number}"),
            Self::Move { region } => write!(f, "move to {region}"),
            Self::Delete => f.write_str("delete"),
            Self::Orphan => f.write_str("orphan"),
        }
    }
}

impl fmt::Display for LinkFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut => f.write_str("cut"),
            Self::Refuse => f.write_str("refuse"),
            Self::Delay(by) => write!(f, "delay {}", Seconds(*by)),
            Self::Loss(per_thousand) => write!(f, "loss {per_thousand}"),
        }
    }
}

impl FromStr for Plan {
    type Err = ParseError;

    /// Reads a plan. Empty lines and lines that start with `#` have no meaning.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut plan = Self {
            seed: 0,
            settings: Settings {
                hubs: 1,
                edges: Vec::new(),
                tenants: Vec::new(),
                self_cluster: false,
                chaos: 0,
                quiet: 0,
                chart: Chart::Plain,
                at_start: None,
            },
            steps: Vec::new(),
        };
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let parsed = match words.as_slice() {
                [] | ["#", ..] => Some(()),
                ["seed", seed] => seed.parse().ok().map(|seed| plan.seed = seed),
                [at, rest @ ..] if at.starts_with(|c: char| c.is_ascii_digit()) => {
                    let step = parse_seconds(at).zip(parse_action(rest));
                    step.map(|(at, action)| plan.steps.push(PlanStep { at, action }))
                }
                words => parse_setting(&mut plan.settings, words),
            };
            parsed.ok_or_else(|| ParseError(line.to_owned()))?;
        }
        Ok(plan)
    }
}

impl FromStr for Action {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        parse_action(&words).ok_or_else(|| ParseError(text.to_owned()))
    }
}

fn parse_setting(settings: &mut Settings, words: &[&str]) -> Option<()> {
    match words {
        ["hubs", hubs] => settings.hubs = hubs.parse().ok()?,
        ["edges", edges @ ..] => {
            settings.edges = edges
                .iter()
                .map(|edge| parse_edge(edge))
                .collect::<Option<_>>()?;
        }
        ["tenants", tenants @ ..] => {
            settings.tenants = tenants
                .iter()
                .map(|tenant| parse_tenant(tenant))
                .collect::<Option<_>>()?;
        }
        ["self-cluster", value @ ("yes" | "no")] => settings.self_cluster = *value == "yes",
        ["at-start", rest @ ..] => settings.at_start = Some(parse_action(rest)?),
        ["chaos", length] => settings.chaos = parse_seconds(length)?,
        ["quiet", length] => settings.quiet = parse_seconds(length)?,
        ["chart", chart] => settings.chart = value_for(&CHARTS, chart)?,
        _ => return None,
    }
    Some(())
}

fn parse_edge(text: &str) -> Option<Edge> {
    let (name, access) = text.split_once(':')?;
    let access = match access {
        "agent" => Access::Agent,
        "kubeconfig" => Access::Kubeconfig,
        "both" => Access::Both,
        _ => return None,
    };
    Some(Edge {
        name: name.to_owned(),
        access,
    })
}

fn parse_tenant(text: &str) -> Option<PlannedTenant> {
    let (name, location) = text.split_once('@')?;
    let (cluster, placed_on) = match location.split_once(':') {
        Some((cluster, member)) => (cluster, Some(member.to_owned())),
        None => (location, None),
    };
    Some(PlannedTenant {
        name: name.to_owned(),
        cluster: cluster.to_owned(),
        placed_on,
    })
}

fn parse_action(words: &[&str]) -> Option<Action> {
    let owned = |name: &&str| (*name).to_owned();
    Some(match words {
        ["tenant", key, rest @ ..] => {
            let (cluster, tenant) = key.split_once('/')?;
            Action::Tenant {
                cluster: cluster.to_owned(),
                tenant: tenant.to_owned(),
                action: parse_tenant_action(rest)?,
            }
        }
        ["member", member, rest @ ..] => Action::Member {
            member: owned(member),
            action: parse_member_action(rest)?,
        },
        ["deployment", name, rest @ ..] => Action::Deployment {
            name: owned(name),
            action: parse_deployment_action(rest)?,
        },
        ["chart-version", version] => Action::ChartVersion {
            version: version.parse().ok()?,
        },
        ["values", number] => Action::Values {
            number: number.parse().ok()?,
        },
        ["rotate-ca"] => Action::RotateCa,
        ["pass-days", days] => Action::PassDays {
            days: days.parse().ok()?,
        },
        ["delete-crd", cluster] => Action::DeleteCrd {
            cluster: owned(cluster),
        },
        ["delete-home-crd", resource] => Action::DeleteHomeCrd {
            resource: owned(resource),
        },
        ["delete-anchor", cluster] => Action::DeleteAnchor {
            cluster: owned(cluster),
        },
        ["link", ..] => parse_link_fault(words)?,
        ["half-open", from, "->", to] => Action::HalfOpen {
            from: owned(from),
            to: owned(to),
        },
        [
            "server" | "end-watches" | "compact" | "restore" | "server-clock",
            ..,
        ] => parse_server_action(words)?,
        _ => parse_host_action(words)?,
    })
}

fn parse_tenant_action(words: &[&str]) -> Option<TenantAction> {
    Some(match words {
        ["create"] => TenantAction::Create { placed_on: None },
        ["create", "on", member] => TenantAction::Create {
            placed_on: Some((*member).to_owned()),
        },
        ["edit", number] => TenantAction::Edit {
            number: number.parse().ok()?,
        },
        ["delete"] => TenantAction::Delete,
        ["orphan"] => TenantAction::Orphan,
        ["relabel", number] => TenantAction::Relabel {
            number: number.parse().ok()?,
        },
        ["pause"] => TenantAction::Pause,
        ["resume"] => TenantAction::Resume,
        ["retry", number] => TenantAction::Retry {
            number: number.parse().ok()?,
        },
        ["add-foreign"] => TenantAction::AddForeign,
        ["remove-foreign"] => TenantAction::RemoveForeign,
        ["delete-release"] => TenantAction::DeleteRelease,
        ["damage-release"] => TenantAction::DamageRelease,
        ["forge-release"] => TenantAction::ForgeRelease,
        ["delete-namespace"] => TenantAction::DeleteNamespace,
        ["delete-object"] => TenantAction::DeleteObject,
        ["add-occupant"] => TenantAction::AddOccupant,
        ["name", member] => TenantAction::SetClusterRef {
            member: (*member).to_owned(),
        },
        ["rewrite", "naming", member] => TenantAction::Rewrite {
            member: (*member).to_owned(),
        },
        ["adopt"] => TenantAction::Adopt,
        _ => return None,
    })
}

fn parse_member_action(words: &[&str]) -> Option<MemberAction> {
    Some(match words {
        ["pause"] => MemberAction::Pause,
        ["resume"] => MemberAction::Resume,
        ["ban"] => MemberAction::Ban,
        ["unban"] => MemberAction::Unban,
        ["delete", policy @ ("uninstall" | "retain")] => MemberAction::Delete {
            uninstall: *policy == "uninstall",
        },
        ["policy", policy @ ("uninstall" | "retain")] => MemberAction::Policy {
            uninstall: *policy == "uninstall",
        },
        ["orphan"] => MemberAction::Orphan,
        ["allow-all"] => MemberAction::Allow { namespace: None },
        ["allow", namespace] => MemberAction::Allow {
            namespace: Some((*namespace).to_owned()),
        },
        ["rebuild"] => MemberAction::Rebuild,
        ["replace"] => MemberAction::Replace,
        ["rejoin"] => MemberAction::Rejoin,
        ["add-twin", "for", length] => MemberAction::AddTwin {
            length: parse_seconds(length)?,
        },
        ["add-elsewhere", "for", length] => MemberAction::AddElsewhere {
            length: parse_seconds(length)?,
        },
        ["damage-kubeconfig", "for", length] => MemberAction::DamageKubeconfig {
            length: parse_seconds(length)?,
        },
        ["delete-kubeconfig", "for", length] => MemberAction::DeleteKubeconfig {
            length: parse_seconds(length)?,
        },
        ["relabel-kubeconfig", "for", length] => MemberAction::RelabelKubeconfig {
            length: parse_seconds(length)?,
        },
        _ => return None,
    })
}

fn parse_deployment_action(words: &[&str]) -> Option<DeploymentAction> {
    Some(match words {
        ["create", "in", region] => DeploymentAction::Create {
            region: (*region).to_owned(),
        },
        ["edit", number] => DeploymentAction::Edit {
            number: number.parse().ok()?,
        },
        ["move", "to", region] => DeploymentAction::Move {
            region: (*region).to_owned(),
        },
        ["delete"] => DeploymentAction::Delete,
        ["orphan"] => DeploymentAction::Orphan,
        _ => return None,
    })
}

fn parse_host_action(words: &[&str]) -> Option<Action> {
    Some(match words {
        ["crash", host, "restart", restart] => Action::Crash {
            host: (*host).to_owned(),
            restart: parse_seconds(restart)?,
        },
        [verb, host, "at-request", nth, rest @ ..] => Action::AtRequest {
            host: (*host).to_owned(),
            nth: nth.parse().ok()?,
            fault: match (*verb, rest) {
                ("crash", ["restart", restart]) => RequestFault::Crash {
                    restart: parse_seconds(restart)?,
                },
                ("fail", []) => RequestFault::Fail,
                ("lose-answer", []) => RequestFault::LoseResponse,
                _ => return None,
            },
        },
        ["stop", host, "for", length] => Action::Stop {
            host: (*host).to_owned(),
            length: parse_seconds(length)?,
        },
        ["freeze", host, "for", length] => Action::Freeze {
            host: (*host).to_owned(),
            length: parse_seconds(length)?,
        },
        ["suspend", host, "for", length] => Action::Suspend {
            host: (*host).to_owned(),
            length: parse_seconds(length)?,
        },
        ["copy-agent", edge, "for", length] => Action::CopyAgent {
            edge: (*edge).to_owned(),
            length: parse_seconds(length)?,
        },
        ["hostile-agent", edge, "for", length] => Action::HostileAgent {
            edge: (*edge).to_owned(),
            length: parse_seconds(length)?,
        },
        ["skew", host, "by", by] => Action::Skew {
            host: (*host).to_owned(),
            by: parse_signed_seconds(by)?,
        },
        _ => return None,
    })
}

fn parse_link_fault(words: &[&str]) -> Option<Action> {
    let [
        "link",
        from,
        arrow @ ("->" | "<->"),
        to,
        fault @ ..,
        "for",
        length,
    ] = words
    else {
        return None;
    };
    let fault = match fault {
        ["cut"] => LinkFault::Cut,
        ["refuse"] => LinkFault::Refuse,
        ["delay", by] => LinkFault::Delay(parse_seconds(by)?),
        ["loss", per_thousand] => LinkFault::Loss(per_thousand.parse().ok()?),
        _ => return None,
    };
    Some(Action::Link {
        from: (*from).to_owned(),
        to: (*to).to_owned(),
        bidirectional: *arrow == "<->",
        fault,
        length: parse_seconds(length)?,
    })
}

fn parse_server_action(words: &[&str]) -> Option<Action> {
    let owned = |name: &&str| (*name).to_owned();
    Some(match words {
        ["server", cluster, fault, scope @ .., "for", length] => Action::Server {
            cluster: owned(cluster),
            fault: value_for(&SERVER_FAULTS, fault)?,
            scope: Scope::parse(scope)?,
            length: parse_seconds(length)?,
        },
        ["end-watches", cluster] => Action::EndWatches {
            cluster: owned(cluster),
        },
        ["compact", cluster] => Action::Compact {
            cluster: owned(cluster),
        },
        ["restore", cluster, "after", after] => Action::Restore {
            cluster: owned(cluster),
            after: parse_seconds(after)?,
        },
        ["server-clock", cluster, "by", by, "for", length] => Action::ServerClock {
            cluster: owned(cluster),
            by: parse_signed_seconds(by)?,
            length: parse_seconds(length)?,
        },
        _ => return None,
    })
}

fn name_for<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    let entry = names.iter().find(|(_, each)| *each == value);
    entry.map_or("", |(name, _)| name)
}

fn value_for<T: Copy>(names: &[(&'static str, T)], name: &str) -> Option<T> {
    let entry = names.iter().find(|(each, _)| *each == name);
    entry.map(|(_, value)| *value)
}

/// Milliseconds, shown as seconds.
struct Seconds(Millis);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            FOREVER => f.write_str("ever"),
            millis => write!(f, "{}.{:03}", millis / 1000, millis % 1000),
        }
    }
}

struct SignedSeconds(i64);

impl fmt::Display for SignedSeconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(f, "{sign}{}", Seconds(self.0.unsigned_abs()))
    }
}

fn parse_seconds(text: &str) -> Option<Millis> {
    if text == "ever" {
        return Some(FOREVER);
    }
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "000"));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if fraction.len() != 3 || !digits(whole) || !digits(fraction) {
        return None;
    }
    let whole: Millis = whole.parse().ok()?;
    whole.checked_mul(1000)?.checked_add(fraction.parse().ok()?)
}

fn parse_signed_seconds(text: &str) -> Option<i64> {
    match text.strip_prefix('-') {
        Some(rest) => Some(-i64::try_from(parse_seconds(rest)?).ok()?),
        None => i64::try_from(parse_seconds(text)?).ok(),
    }
}

//! The text form of plans: one line for each setting and each step.

use std::fmt;
use std::str::FromStr;

use super::{
    Access, Action, Chart, DeploymentAction, Edge, FOREVER, LinkFault, MemberAction, Plan,
    PlanStep, PlannedTenant, RequestFault, Scope, ServerFault, Settings, TenantAction,
};
use crate::time::Millis;

/// A line that is not part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a line of a plan")]
pub struct ParseError(String);

/// A part of a line.
trait Words: Sized {
    fn to_words(&self) -> Vec<String>;

    fn from_words(words: &[&str]) -> Option<Self>;
}

/// Implements [`Words`] for an enum. Each row lists the words and fields of a line, and their value. A field
/// after a semicolon can have several words.
macro_rules! words {
    ($type:ident: $(
        ($($word:literal $($field:ident)*)+ $(; $long:ident $($end:literal $last:ident)?)?)
            => ($($value:tt)+)
    ),+ $(,)?) => {
        impl Words for $type {
            fn to_words(&self) -> Vec<String> {
                match self {
                    $(Self::$($value)+ => [
                        $(vec![$word.to_owned()] $(, $field.to_words())*),+
                        $(, $long.to_words() $(, vec![$end.to_owned()], $last.to_words())?)?
                    ]
                    .concat(),)+
                }
            }

            fn from_words(words: &[&str]) -> Option<Self> {
                match words {
                    $([$($word $(, $field)*),+ $(, $long @ .. $(, $end, $last)?)?] => {
                        $($(let $field = Words::from_words(&[*$field])?;)*)+
                        $(
                            let $long = Words::from_words($long)?;
                            $(let $last = Words::from_words(&[*$last])?;)?
                        )?
                        Some(Self::$($value)+)
                    })+
                    _ => None,
                }
            }
        }
    };
}

words! { Action:
    ("tenant" cluster "/" tenant; action) => (Tenant { cluster, tenant, action }),
    ("member" member; action) => (Member { member, action }),
    ("deployment" name; action) => (Deployment { name, action }),
    ("chart-version" version) => (ChartVersion { version }),
    ("values" number) => (Values { number }),
    ("rotate-ca") => (RotateCa),
    ("pass-days" days) => (PassDays { days }),
    ("delete-crd" cluster) => (DeleteCrd { cluster }),
    ("delete-home-crd" resource) => (DeleteHomeCrd { resource }),
    ("delete-anchor" cluster) => (DeleteAnchor { cluster }),
    ("delete-epoch") => (DeleteEpoch),
    ("crash" host "restart" restart) => (Crash { host, restart }),
    ("crash" host "at-request" nth "restart" restart)
        => (AtRequest { host, nth, fault: RequestFault::Crash { restart } }),
    ("fail" host "at-request" nth) => (AtRequest { host, nth, fault: RequestFault::Fail }),
    ("lose-answer" host "at-request" nth)
        => (AtRequest { host, nth, fault: RequestFault::LoseResponse }),
    ("stop" host "for" length) => (Stop { host, length }),
    ("freeze" host "for" length) => (Freeze { host, length }),
    ("suspend" host "for" length) => (Suspend { host, length }),
    ("copy-agent" edge "for" length) => (CopyAgent { edge, length }),
    ("hostile-agent" edge "for" length) => (HostileAgent { edge, length }),
    ("skew" host "by" by) => (Skew { host, by }),
    ("link" from "->" to; fault "for" length)
        => (Link { from, to, bidirectional: false, fault, length }),
    ("link" from "<->" to; fault "for" length)
        => (Link { from, to, bidirectional: true, fault, length }),
    ("half-open" from "->" to) => (HalfOpen { from, to }),
    ("server" cluster fault; scope "for" length) => (Server { cluster, fault, scope, length }),
    ("end-watches" cluster) => (EndWatches { cluster }),
    ("compact" cluster) => (Compact { cluster }),
    ("restore" cluster "after" after) => (Restore { cluster, after }),
    ("server-clock" cluster "by" by "for" length) => (ServerClock { cluster, by, length }),
}

words! { TenantAction:
    ("create") => (Create { placed_on: None }),
    ("create" "on" member) => (Create { placed_on: Some(member) }),
    ("edit" number) => (Edit { number }),
    ("delete") => (Delete),
    ("orphan") => (Orphan),
    ("relabel" number) => (Relabel { number }),
    ("pause") => (Pause),
    ("resume") => (Resume),
    ("retry" number) => (Retry { number }),
    ("add-foreign") => (AddForeign),
    ("remove-foreign") => (RemoveForeign),
    ("delete-release") => (DeleteRelease),
    ("damage-release") => (DamageRelease),
    ("forge-release") => (ForgeRelease),
    ("delete-namespace") => (DeleteNamespace),
    ("delete-object") => (DeleteObject),
    ("add-occupant") => (AddOccupant),
    ("name" member) => (SetClusterRef { member }),
    ("rewrite" "naming" member) => (Rewrite { member }),
    ("adopt") => (Adopt),
}

words! { MemberAction:
    ("pause") => (Pause),
    ("resume") => (Resume),
    ("ban") => (Ban),
    ("unban") => (Unban),
    ("delete" "uninstall") => (Delete { uninstall: true }),
    ("delete" "retain") => (Delete { uninstall: false }),
    ("policy" "uninstall") => (Policy { uninstall: true }),
    ("policy" "retain") => (Policy { uninstall: false }),
    ("orphan") => (Orphan),
    ("allow-all") => (Allow { namespace: None }),
    ("allow" namespace) => (Allow { namespace: Some(namespace) }),
    ("rebuild") => (Rebuild),
    ("replace") => (Replace),
    ("rejoin") => (Rejoin),
    ("add-twin" "for" length) => (AddTwin { length }),
    ("add-elsewhere" "for" length) => (AddElsewhere { length }),
    ("damage-kubeconfig" "for" length) => (DamageKubeconfig { length }),
    ("delete-kubeconfig" "for" length) => (DeleteKubeconfig { length }),
    ("relabel-kubeconfig" "for" length) => (RelabelKubeconfig { length }),
}

words! { DeploymentAction:
    ("create" "in" region) => (Create { region }),
    ("edit" number) => (Edit { number }),
    ("move" "to" region) => (Move { region }),
    ("delete") => (Delete),
    ("orphan") => (Orphan),
}

words! { LinkFault:
    ("cut") => (Cut),
    ("refuse") => (Refuse),
    ("delay" by) => (Delay(by)),
    ("loss" per_thousand) => (Loss(per_thousand)),
}

words! { ServerFault:
    ("down") => (Down),
    ("hangs") => (Hangs),
    ("429") => (TooManyRequests),
    ("500") => (InternalError),
    ("503") => (Unavailable),
    ("html") => (Html),
    ("401") => (Unauthorized),
    ("403") => (Forbidden),
    ("404") => (NotFound),
    ("410") => (Gone),
    ("502") => (BadGateway),
    ("empty") => (EmptyLists),
    ("cut") => (CutBodies),
    ("failing-jobs") => (FailingJobs),
}

words! { Chart:
    ("plain") => (Plain),
    ("hooks") => (Hooks),
    ("failing-upgrade") => (FailingUpgrade),
    ("slow") => (Slow),
}

words! { Access:
    ("agent") => (Agent),
    ("kubeconfig") => (Kubeconfig),
    ("both") => (Both),
}

impl Words for Scope {
    fn to_words(&self) -> Vec<String> {
        let text = self.to_string();
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        Self::parse(words)
    }
}

impl Words for String {
    fn to_words(&self) -> Vec<String> {
        vec![self.clone()]
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        let [word] = words else { return None };
        Some((*word).to_owned())
    }
}

impl Words for u32 {
    fn to_words(&self) -> Vec<String> {
        vec![self.to_string()]
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        let [word] = words else { return None };
        word.parse().ok()
    }
}

impl Words for Millis {
    fn to_words(&self) -> Vec<String> {
        vec![Seconds(*self).to_string()]
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        let [word] = words else { return None };
        parse_seconds(word)
    }
}

/// A difference of two times.
impl Words for i64 {
    fn to_words(&self) -> Vec<String> {
        let sign = if *self < 0 { "-" } else { "" };
        vec![format!("{sign}{}", Seconds(self.unsigned_abs()))]
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        let [word] = words else { return None };
        match word.strip_prefix('-') {
            Some(rest) => Some(-Self::try_from(parse_seconds(rest)?).ok()?),
            None => Self::try_from(parse_seconds(word)?).ok(),
        }
    }
}

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
            write!(f, " {}:{}", edge.name, edge.access.to_words().concat())?;
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
        if self.crds_exist {
            writeln!(f, "crds exist")?;
        }
        if self.long_leader_lease {
            writeln!(f, "leader-lease long")?;
        }
        writeln!(f, "chaos {}", Seconds(self.chaos))?;
        writeln!(f, "quiet {}", Seconds(self.quiet))?;
        writeln!(f, "chart {}", self.chart.to_words().concat())?;
        match &self.at_start {
            Some(action) => writeln!(f, "at-start {action}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_words().join(" ").replace(" / ", "/"))
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
                ..Settings::default()
            },
            steps: Vec::new(),
        };
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let parsed = match words.as_slice() {
                [] | ["#", ..] => Some(()),
                ["seed", seed] => seed.parse().ok().map(|seed| plan.seed = seed),
                [at, rest @ ..] if at.starts_with(|c: char| c.is_ascii_digit()) => {
                    let step = parse_seconds(at).zip(rest.join(" ").parse::<Action>().ok());
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
        // A cluster and its Tenant are two words.
        let spaced = text.replace('/', " / ");
        let words: Vec<&str> = spaced.split_whitespace().collect();
        Self::from_words(&words).ok_or_else(|| ParseError(text.to_owned()))
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
        ["crds", "exist"] => settings.crds_exist = true,
        ["at-start", rest @ ..] => settings.at_start = Some(rest.join(" ").parse::<Action>().ok()?),
        ["leader-lease", "long"] => settings.long_leader_lease = true,
        ["chaos", length] => settings.chaos = parse_seconds(length)?,
        ["quiet", length] => settings.quiet = parse_seconds(length)?,
        ["chart", chart] => settings.chart = Chart::from_words(&[*chart])?,
        _ => return None,
    }
    Some(())
}

fn parse_edge(text: &str) -> Option<Edge> {
    let (name, access) = text.split_once(':')?;
    Some(Edge {
        name: name.to_owned(),
        access: Access::from_words(&[access])?,
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

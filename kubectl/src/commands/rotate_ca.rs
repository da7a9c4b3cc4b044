//! `kubectl krypton rotate-ca`: asks the hub for a new root of its CA, tells how far that is, and names
//! whom it is not to be waited for. Only the Secret's metadata is read and written: its keys stay at home.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::ca_rotation::{
    Awaited, LOCK_OUT_ANNOTATION, LOOK_EVERY, LockOut, Phase, REQUEST_ANNOTATION,
    STANDING_ANNOTATION, Stage, Standing, awaited,
};
use krypton_types::names::{CA_SECRET, namespace_name};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::{Client, Error as KubeError};
use serde_json::json;

use crate::home::{HomeArgs, PAGE_SIZE, REQUEST_TIMEOUT};
use crate::render::{Printed, Table, age, one_line, or_dash};

/// Writes that the hub may get in the way of.
const TRIES: usize = 3;
const ASK_AGAIN: &str = "kubectl krypton rotate-ca --status";
/// After this, a request that no hub has taken up is worth a word.
const TAKEN_UP_WITHIN: Duration = Duration::from_secs(6 * LOOK_EVERY.as_secs());

#[derive(Clone, Debug, Args)]
pub(crate) struct RotateCa {
    /// Only tell how far a rotation is, and who is waited for.
    #[arg(long, conflicts_with_all = ["force", "lock_out"])]
    status: bool,
    /// Go on with a rotation that waits, and lock out those that it waits for: see --lock-out.
    #[arg(long)]
    force: bool,
    /// With --force: each cluster that is locked out by it, and will have to join again.
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        requires = "force"
    )]
    lock_out: Vec<String>,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

/// Why the rotation is left as it is.
#[derive(Debug, thiserror::Error)]
pub enum RotateCaError {
    #[error(
        "the cluster {context:?} has no Secret {CA_SECRET} in {looked}, so no hub of Krypton that agents can join is there; name the hub's namespace with -n, or choose its home cluster with --context or --kubeconfig"
    )]
    NoHub { context: String, looked: String },
    #[error(
        "reading the metadata of Secret {CA_SECRET} on the cluster {context:?} failed; you need the verb get on it"
    )]
    Read {
        context: String,
        #[source]
        source: KubeError,
    },
    #[error(
        "writing an annotation of Secret {CA_SECRET} on the cluster {context:?} failed; you need the verb patch on it"
    )]
    Write {
        context: String,
        #[source]
        source: KubeError,
    },
    #[error(
        "listing the EdgeClusters on the cluster {context:?} failed; you need the verb list on them"
    )]
    List {
        context: String,
        #[source]
        source: KubeError,
    },
    #[error("the cluster {context:?} did not answer within 30 s; check that it is reachable")]
    TimedOut { context: String },
    #[error("Secret {CA_SECRET} is written by others all the time; find out by whom")]
    Unsteady,
    #[error(
        "a rotation is under way ({phase}), and there is one at a time; '{ASK_AGAIN}' tells how far it is"
    )]
    UnderWay { phase: Phase },
    #[error(
        "a rotation was asked for already, and the hub has not begun it; '{ASK_AGAIN}' tells when"
    )]
    Asked,
    #[error(
        "no rotation is under way, so there is nothing to force; run 'kubectl krypton rotate-ca' first"
    )]
    NothingToForce,
    #[error("nobody is waited for: the rotation goes on by itself")]
    NobodyAwaited,
    #[error(
        "{} will have to join again, and each must be named: {}; if that is meant, run 'kubectl krypton rotate-ca --force --lock-out={}'",
        count(.0.len()), listed(.0), names(.0)
    )]
    NotNamed(Vec<Awaited>),
    #[error("{0} is not waited for, so it is not locked out; '{ASK_AGAIN}' names those that are")]
    NotAwaited(String),
}

fn count(members: usize) -> String {
    match members {
        1 => "1 cluster".to_owned(),
        members => format!("{members} clusters"),
    }
}

fn listed(members: &[Awaited]) -> String {
    let texts: Vec<String> = members
        .iter()
        .map(|member| format!("{} ({member})", member.name))
        .collect();
    texts.join(", ")
}

fn names(members: &[Awaited]) -> String {
    let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
    names.join(",")
}

pub(crate) async fn run(
    args: RotateCa,
    client: Client,
    context: &str,
    context_namespace: &str,
    now: Timestamp,
) -> Result<Printed, RotateCaError> {
    let places = super::join::places(args.namespace.as_deref(), context_namespace);
    let desk = CaSecret { client, context };
    for _ in 0..TRIES {
        let (namespace, found) = desk.find(&places).await?;
        let record = Record::of(&found);
        let members = match record.standing {
            Some(_) => desk.members().await?,
            None => Vec::new(),
        };
        if args.status {
            return Ok(status(&record, &members, now));
        }
        let (annotation, value, told) = match args.force {
            true => force(&record, &members, &args.lock_out, now)?,
            false => start(&record, now)?,
        };
        let version = found.metadata.resource_version.as_deref();
        if desk
            .annotate(&namespace, version, annotation, &value)
            .await?
        {
            return Ok(Printed {
                stdout: told,
                stderr: String::new(),
            });
        }
    }
    Err(RotateCaError::Unsteady)
}

/// What is to be written, and what to say of it.
type Change = (&'static str, String, String);

fn start(record: &Record, now: Timestamp) -> Result<Change, RotateCaError> {
    match &record.standing {
        Some(standing) if standing.phase != Phase::Steady => Err(RotateCaError::UnderWay {
            phase: standing.phase,
        }),
        _ if record.requested.is_some() => Err(RotateCaError::Asked),
        _ => {
            let told = format!(
                "The hub makes a new root within {} s and tells all agents; once each trusts it, it signs, and they renew.\n\
                 Agents stay connected. One that is away is waited for. Bundles of 'kubectl krypton join' printed before now end with it.\n\
                 How far it is: {ASK_AGAIN}\n",
                LOOK_EVERY.as_secs()
            );
            Ok((REQUEST_ANNOTATION, now.to_string(), told))
        }
    }
}

fn force(
    record: &Record,
    members: &[EdgeCluster],
    named: &[String],
    now: Timestamp,
) -> Result<Change, RotateCaError> {
    let stage = record.stage().ok_or(RotateCaError::NothingToForce)?;
    let waiting = awaited(stage, members, now);
    if waiting.is_empty() {
        return Err(RotateCaError::NobodyAwaited);
    }
    let named: BTreeSet<String> = named.iter().cloned().collect();
    let is_named = |member: &&Awaited| named.contains(&member.name);
    let (out, left): (Vec<&Awaited>, Vec<&Awaited>) = waiting.iter().partition(is_named);
    if !left.is_empty() {
        return Err(RotateCaError::NotNamed(waiting));
    }
    // A slip of the pen would lock out another one later.
    let known = |name: &&String| !out.iter().any(|member| member.name == **name);
    if let Some(stranger) = named.iter().find(known) {
        return Err(RotateCaError::NotAwaited(stranger.clone()));
    }
    let root = stage.root.to_string();
    let before = record.lock_out.clone().filter(|before| before.root == root);
    let mut lock_out = before.unwrap_or_default();
    lock_out.root = root;
    match stage.phase {
        Phase::Switched => lock_out.switched.extend(named),
        Phase::Announced | Phase::Steady => lock_out.announced.extend(named),
    }
    let value = serde_json::to_string(&lock_out).unwrap_or_default();
    let mut told = "The rotation goes on without:\n".to_owned();
    for Awaited { name, .. } in out {
        told.push_str(&format!(
            "  {name}: run 'kubectl krypton join {name}' and enrol its agent again\n"
        ));
    }
    Ok((LOCK_OUT_ANNOTATION, value, told))
}

fn status(record: &Record, members: &[EdgeCluster], now: Timestamp) -> Printed {
    let since = |time: Timestamp| age(time, now);
    let mut stdout = match &record.standing {
        Some(standing) => {
            let ago = since(standing.since);
            let root: String = one_line(&standing.root).chars().take(16).collect();
            let told = match standing.phase {
                Phase::Steady => format!(
                    "No rotation of the CA is under way; the last one ended {ago} ago with the root"
                ),
                Phase::Announced => format!(
                    "Announced {ago} ago: agents are told of the new root; when all trust it, it signs. It is"
                ),
                Phase::Switched => format!(
                    "Switched {ago} ago: the new root signs, and agents renew; when all have, the former one is dropped. The new one is"
                ),
            };
            format!("{told} {root}.\n")
        }
        None => "No rotation of the CA is under way, and there was none yet.\n".to_owned(),
    };
    let mut stderr = String::new();
    if let Some(requested) = record.requested {
        stdout.push_str(&format!(
            "One was asked for {} ago and is about to begin.\n",
            since(requested)
        ));
        let waited = Duration::try_from(now.duration_since(requested)).unwrap_or_default();
        if waited > TAKEN_UP_WITHIN {
            stderr = "No hub has taken it up: check that one is running, of a version that can rotate its CA.\n".to_owned();
        }
    }
    let waiting = record.stage().map(|stage| awaited(stage, members, now));
    match waiting.as_deref() {
        None => {}
        Some([]) => stdout.push_str("Nobody is waited for.\n"),
        Some(waiting) => {
            let mut table = Table::new(&["WAITING-FOR", "CONNECTED", "LAST-SEEN", "AGENT", "WHY"]);
            for member in waiting {
                table.push(vec![
                    member.name.clone(),
                    if member.connected { "True" } else { "False" }.to_owned(),
                    or_dash(member.last_seen.map(since)),
                    or_dash(member.agent_version.as_deref().map(one_line)),
                    format!("{member}: {}", member.remedy()),
                ]);
            }
            stdout.push_str(&table.render());
        }
    }
    Printed { stdout, stderr }
}

/// What the Secret's annotations say.
#[derive(Clone, Debug, Default)]
struct Record {
    standing: Option<Standing>,
    requested: Option<Timestamp>,
    lock_out: Option<LockOut>,
}

impl Record {
    fn of(found: &PartialObjectMeta<Secret>) -> Self {
        let text = |key| found.metadata.annotations.as_ref()?.get(key);
        let requested = text(REQUEST_ANNOTATION);
        Self {
            standing: text(STANDING_ANNOTATION).and_then(|text| serde_json::from_str(text).ok()),
            requested: requested.map(|text| text.parse().unwrap_or(Timestamp::UNIX_EPOCH)),
            lock_out: text(LOCK_OUT_ANNOTATION).and_then(|text| serde_json::from_str(text).ok()),
        }
    }

    /// Of a rotation that is under way.
    fn stage(&self) -> Option<Stage> {
        let standing = self.standing.as_ref()?;
        let root = standing.root.parse().ok()?;
        let phase = standing.phase;
        (phase != Phase::Steady).then_some(Stage { phase, root })
    }
}

/// Home, as who runs this may see it.
struct CaSecret<'a> {
    client: Client,
    context: &'a str,
}

impl CaSecret<'_> {
    async fn find(
        &self,
        places: &[String],
    ) -> Result<(String, PartialObjectMeta<Secret>), RotateCaError> {
        let mut forbidden = None;
        for namespace in places {
            let api = self.secrets(namespace);
            match self.in_time(api.get_metadata_opt(CA_SECRET)).await? {
                Ok(Some(found)) => return Ok((namespace.clone(), found)),
                Ok(None) => {}
                // It may be in the next one.
                Err(KubeError::Api(status)) if status.code == 403 => {
                    forbidden = forbidden.or(Some(KubeError::Api(status)));
                }
                Err(source) => return Err(self.unread(source)),
            }
        }
        Err(match forbidden {
            Some(source) => self.unread(source),
            None => RotateCaError::NoHub {
                context: self.context.to_owned(),
                looked: match places {
                    [one] => format!("the namespace {one}"),
                    all => format!("the namespaces {}", all.join(" and ")),
                },
            },
        })
    }

    fn unread(&self, source: KubeError) -> RotateCaError {
        RotateCaError::Read {
            context: self.context.to_owned(),
            source,
        }
    }

    /// False when somebody else has written meanwhile.
    async fn annotate(
        &self,
        namespace: &str,
        version: Option<&str>,
        annotation: &str,
        value: &str,
    ) -> Result<bool, RotateCaError> {
        let patch = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"resourceVersion": version, "annotations": {annotation: value}},
        });
        let (api, params) = (self.secrets(namespace), PatchParams::default());
        let patch = Patch::Merge(patch);
        match self
            .in_time(api.patch_metadata(CA_SECRET, &params, &patch))
            .await?
        {
            Ok(_) => Ok(true),
            Err(KubeError::Api(status)) if status.code == 409 => Ok(false),
            Err(source) => Err(RotateCaError::Write {
                context: self.context.to_owned(),
                source,
            }),
        }
    }

    async fn members(&self) -> Result<Vec<EdgeCluster>, RotateCaError> {
        let api: Api<EdgeCluster> = Api::all(self.client.clone());
        let mut params = ListParams::default().limit(PAGE_SIZE);
        let mut members = Vec::new();
        loop {
            let page = self.in_time(api.list(&params)).await?;
            let page = page.map_err(|source| RotateCaError::List {
                context: self.context.to_owned(),
                source,
            })?;
            members.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(members),
            }
        }
    }

    fn secrets(&self, namespace: &str) -> Api<Secret> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn in_time<T>(&self, call: impl Future<Output = T>) -> Result<T, RotateCaError> {
        tokio::time::timeout(REQUEST_TIMEOUT, call)
            .await
            .map_err(|_| RotateCaError::TimedOut {
                context: self.context.to_owned(),
            })
    }
}

//! `kubectl krypton rotate-ca`: requests a new root of the hub's CA, shows the progress, and locks out members that block
//! a rotation. It reads and writes only the Secret's metadata: the keys stay in the Secret.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::ca_rotation::{
    Awaited, LOCK_OUT_ANNOTATION, LOOK_EVERY, LockOut, Phase, REQUEST_ANNOTATION,
    ROTATION_STATE_ANNOTATION, RotationState, Stage, awaited,
};
use krypton_types::names::{CA_SECRET, namespace_name};
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use serde_json::json;

use crate::error::KubectlError;
use crate::home::Target;
use crate::objects::retry_conflicts;
use crate::render::{Printed, Table, age, one_line, or_dash};

const SHOW_STATUS: &str = "kubectl krypton rotate-ca --status";
/// A hub that runs accepts a request within this time.
const ACCEPTED_WITHIN: Duration = Duration::from_secs(6 * LOOK_EVERY.as_secs());

#[derive(Clone, Debug, Args)]
pub(crate) struct RotateCa {
    /// Only show the progress of a rotation, and the clusters that it waits for
    #[arg(long, conflicts_with_all = ["force", "lock_out"])]
    status: bool,
    /// Continue a waiting rotation without the clusters of --lock-out
    #[arg(long)]
    force: bool,
    /// With --force: each cluster that the rotation waits for. These clusters lose access and must join again
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        requires = "force"
    )]
    lock_out: Vec<String>,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
}

pub(crate) async fn run(
    args: RotateCa,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let home = target.connect().await?;
    let namespaces = home.hub_namespaces(args.namespace.as_deref());
    let read = async |namespace: &str| {
        let secrets = home.namespaced::<Secret>(namespace);
        let reading = secrets.api.get_metadata_opt(CA_SECRET);
        secrets.call("get", CA_SECRET, reading).await
    };
    let object = format!("Secret {CA_SECRET}");
    retry_conflicts(&object, async || {
        let (namespace, found) = home.search_hub(&object, &namespaces, read).await?;
        let record = Record::of(&found);
        let members = match record.rotation_state {
            Some(_) => {
                home.all::<EdgeCluster>()
                    .list(ListParams::default())
                    .await?
            }
            None => Vec::new(),
        };
        if args.status {
            return Ok(status(&record, &members, now));
        }
        let (annotation, value, result) = match args.force {
            true => force(&record, &members, &args.lock_out, now)?,
            false => start(&record, now)?,
        };
        let version = &found.metadata.resource_version;
        let patch = Patch::Merge(json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"resourceVersion": version, "annotations": {annotation: value}},
        }));
        let secrets = home.namespaced::<Secret>(&namespace);
        let params = PatchParams::default();
        let patching = secrets.api.patch_metadata(CA_SECRET, &params, &patch);
        secrets.call("patch", CA_SECRET, patching).await?;
        Ok(Printed::stdout(result))
    })
    .await
}

/// The annotation to write, its value, and the message for the user.
type Change = (&'static str, String, String);

fn refused<T>(why: impl Into<String>) -> Result<T, KubectlError> {
    Err(KubectlError::Refused(why.into()))
}

fn start(record: &Record, now: Timestamp) -> Result<Change, KubectlError> {
    match &record.rotation_state {
        Some(RotationState { phase, .. }) if *phase != Phase::Steady => refused(format!(
            "another rotation is in progress ({phase}); '{SHOW_STATUS}' shows its progress"
        )),
        _ if record.requested.is_some() => refused(format!(
            "a rotation was requested already, and the hub has not started it; '{SHOW_STATUS}' shows when it does"
        )),
        _ => {
            let result = format!(
                "The hub creates a new root within {} s and sends it to all agents. Once each trusts it, the root signs, and the agents renew.\n\
                 Agents stay connected. The hub waits for an agent that is disconnected. Existing bundles of 'kubectl krypton join' become invalid at the end.\n\
                 To show the progress, run {SHOW_STATUS}\n",
                LOOK_EVERY.as_secs()
            );
            Ok((REQUEST_ANNOTATION, now.to_string(), result))
        }
    }
}

fn force(
    record: &Record,
    members: &[EdgeCluster],
    named: &[String],
    now: Timestamp,
) -> Result<Change, KubectlError> {
    let Some(stage) = record.stage() else {
        return refused(
            "no rotation is in progress, so there is nothing to force; run 'kubectl krypton rotate-ca' first",
        );
    };
    let waiting = awaited(stage, members, now);
    if waiting.is_empty() {
        return refused("no cluster blocks the rotation; it continues without --force");
    }
    let named: BTreeSet<String> = named.iter().cloned().collect();
    if waiting.iter().any(|member| !named.contains(&member.name)) {
        return refused(not_named(&waiting));
    }
    // A misspelt name would lock out that cluster in a later phase.
    let is_waiting = |name: &String| waiting.iter().any(|member| member.name == *name);
    if let Some(stranger) = named.iter().find(|name| !is_waiting(name)) {
        return refused(format!(
            "{stranger} is not waited for, so it is not locked out; '{SHOW_STATUS}' names the clusters that are"
        ));
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
    let mut result = "The rotation continues without:\n".to_owned();
    for Awaited { name, .. } in &waiting {
        result +=
            &format!("  {name}: run 'kubectl krypton join {name}' and enroll its agent again\n");
    }
    Ok((LOCK_OUT_ANNOTATION, value, result))
}

/// The message if the user has not named each cluster that the rotation would lock out.
fn not_named(waiting: &[Awaited]) -> String {
    let names: Vec<&str> = waiting.iter().map(|member| member.name.as_str()).collect();
    let reasons = waiting
        .iter()
        .map(|member| format!("{} ({member})", member.name));
    let reasons: Vec<String> = reasons.collect();
    format!(
        "{} cluster{} will have to join again, and you must name each: {}; to confirm, run 'kubectl krypton rotate-ca --force --lock-out={}'",
        waiting.len(),
        if waiting.len() == 1 { "" } else { "s" },
        reasons.join(", "),
        names.join(",")
    )
}

fn status(record: &Record, members: &[EdgeCluster], now: Timestamp) -> Printed {
    let mut stdout = match &record.rotation_state {
        Some(rotation_state) => {
            let ago = age(rotation_state.since, now);
            let root: String = one_line(&rotation_state.root).chars().take(16).collect();
            let phase = match rotation_state.phase {
                Phase::Steady => format!(
                    "No rotation of the CA is in progress; the last one ended {ago} ago with the root"
                ),
                Phase::Announced => format!(
                    "Announced {ago} ago: agents receive the new root; when all trust it, it signs. It is"
                ),
                Phase::Switched => format!(
                    "Switched {ago} ago: the new root signs, and agents renew; when all have, the hub drops the previous one. The new one is"
                ),
            };
            format!("{phase} {root}.\n")
        }
        None => "No rotation of the CA is in progress, and there has been none.\n".to_owned(),
    };
    let mut stderr = String::new();
    if let Some(requested) = record.requested {
        let ago = age(requested, now);
        stdout += &format!("A rotation was requested {ago} ago and is about to start.\n");
        let waited = Duration::try_from(now.duration_since(requested)).unwrap_or_default();
        if waited > ACCEPTED_WITHIN {
            stderr = "No hub has accepted it: check that a hub runs, and that its version can rotate its CA.\n".to_owned();
        }
    }
    let waiting = record.stage().map(|stage| awaited(stage, members, now));
    match waiting.as_deref() {
        None => {}
        Some([]) => stdout += "No cluster blocks the rotation.\n",
        Some(waiting) => {
            let mut table = Table::new(["WAITING-FOR", "CONNECTED", "LAST-SEEN", "AGENT", "WHY"]);
            for member in waiting {
                table.push(vec![
                    member.name.clone(),
                    if member.connected { "True" } else { "False" }.to_owned(),
                    or_dash(member.last_seen.map(|seen| age(seen, now))),
                    or_dash(member.agent_version.as_deref()),
                    format!("{member}: {}", member.remedy()),
                ]);
            }
            stdout += &table.render();
        }
    }
    Printed { stdout, stderr }
}

/// The Secret's annotations.
#[derive(Clone, Debug, Default)]
struct Record {
    rotation_state: Option<RotationState>,
    requested: Option<Timestamp>,
    lock_out: Option<LockOut>,
}

impl Record {
    fn of(found: &PartialObjectMeta<Secret>) -> Self {
        let text = |key| found.metadata.annotations.as_ref()?.get(key);
        let requested = text(REQUEST_ANNOTATION);
        Self {
            rotation_state: text(ROTATION_STATE_ANNOTATION)
                .and_then(|text| serde_json::from_str(text).ok()),
            requested: requested.map(|text| text.parse().unwrap_or(Timestamp::UNIX_EPOCH)),
            lock_out: text(LOCK_OUT_ANNOTATION).and_then(|text| serde_json::from_str(text).ok()),
        }
    }

    /// The stage of a rotation that is in progress.
    fn stage(&self) -> Option<Stage> {
        let rotation_state = self.rotation_state.as_ref()?;
        let root = rotation_state.root.parse().ok()?;
        let phase = rotation_state.phase;
        (phase != Phase::Steady).then_some(Stage { phase, root })
    }
}

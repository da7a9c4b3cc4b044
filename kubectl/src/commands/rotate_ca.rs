//! `kubectl krypton rotate-ca`: requests a new root of the hub's CA, shows the progress, and locks out members that block
//! a rotation. It reads and writes only the Secret's metadata: the keys stay in the Secret.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_types::ca_rotation::{
    BlockingMember, LOCK_OUT_ANNOTATION, LockOut, READ_INTERVAL, REQUEST_ANNOTATION,
    ROTATION_STATE_ANNOTATION, RotationPhase, RotationStage, RotationState, blocking_members,
};
use krypton_types::names::CA_SECRET;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::PartialObjectMeta;
use serde_json::json;

use crate::error::KubectlError;
use crate::home::Target;
use crate::objects::retry_conflicts;
use crate::render::{CommandOutput, Table, age, one_line, or_dash};

const SHOW_STATUS: &str = "kubectl krypton rotate-ca --status";
/// A hub that runs accepts a request within this time.
const ACCEPTANCE_DEADLINE: Duration = Duration::from_secs(6 * READ_INTERVAL.as_secs());
const EXAMPLES: &str = "\
Examples:
  # Start a rotation
  kubectl krypton rotate-ca

  # Show the progress of a rotation
  kubectl krypton rotate-ca --status";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
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
}

pub(crate) async fn run(
    args: RotateCa,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let namespaces = home.hub_namespaces();
    let read = async |namespace: &str| {
        let secrets = home.namespaced::<Secret>(namespace);
        let reading = secrets.api.get_metadata_opt(CA_SECRET);
        secrets.call("get", CA_SECRET, reading).await
    };
    let object = format!("Secret {CA_SECRET}");
    retry_conflicts(&object, async || {
        let (namespace, secret) = home.search_hub(&object, &namespaces, read).await?;
        let annotations = CaAnnotations::from_metadata(&secret);
        let members = match annotations.rotation_state {
            Some(_) => {
                home.all::<EdgeCluster>()
                    .list(ListParams::default())
                    .await?
            }
            None => Vec::new(),
        };
        if args.status {
            return Ok(status_output(&annotations, &members, now));
        }
        let (annotation, value, result) = match args.force {
            true => request_lock_out(&annotations, &members, &args.lock_out, now)?,
            false => request_rotation(&annotations, now)?,
        };
        let version = &secret.metadata.resource_version;
        let patch = Patch::Merge(json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"resourceVersion": version, "annotations": {annotation: value}},
        }));
        let secrets = home.namespaced::<Secret>(&namespace);
        let params = PatchParams::default();
        let patching = secrets.api.patch_metadata(CA_SECRET, &params, &patch);
        secrets.call("patch", CA_SECRET, patching).await?;
        Ok(CommandOutput::stdout(result))
    })
    .await
}

/// The annotation to write, its value, and the message for the user.
type AnnotationChange = (&'static str, String, String);

fn refused<T>(reason: impl Into<String>) -> Result<T, KubectlError> {
    Err(KubectlError::Refused(reason.into()))
}

fn request_rotation(
    annotations: &CaAnnotations,
    now: Timestamp,
) -> Result<AnnotationChange, KubectlError> {
    match &annotations.rotation_state {
        Some(RotationState { phase, .. }) if *phase != RotationPhase::Steady => refused(format!(
            "another rotation is in progress ({phase}); '{SHOW_STATUS}' shows its progress"
        )),
        _ if annotations.requested.is_some() => refused(format!(
            "a rotation was requested already, and the hub has not started it; '{SHOW_STATUS}' shows when it does"
        )),
        _ => {
            let result = format!(
                "The hub creates a new root within {} s and sends it to all agents. Once each trusts it, the root signs, and the agents renew.\n\
                 Agents stay connected. The hub waits for an agent that is disconnected. Existing bundles of 'kubectl krypton join' become invalid at the end.\n\
                 To show the progress, run {SHOW_STATUS}\n",
                READ_INTERVAL.as_secs()
            );
            Ok((REQUEST_ANNOTATION, now.to_string(), result))
        }
    }
}

fn request_lock_out(
    annotations: &CaAnnotations,
    members: &[EdgeCluster],
    confirmed: &[String],
    now: Timestamp,
) -> Result<AnnotationChange, KubectlError> {
    let Some(stage) = annotations.stage() else {
        return refused(
            "no rotation is in progress, so there is nothing to force; run 'kubectl krypton rotate-ca' first",
        );
    };
    let blocking = blocking_members(stage, members, now);
    if blocking.is_empty() {
        return refused("no cluster blocks the rotation; it continues without --force");
    }
    let confirmed: BTreeSet<String> = confirmed.iter().cloned().collect();
    if blocking
        .iter()
        .any(|member| !confirmed.contains(&member.name))
    {
        return refused(unconfirmed_message(&blocking));
    }
    // A misspelt name would lock out that cluster in a later phase.
    let is_blocking = |name: &String| blocking.iter().any(|member| member.name == *name);
    if let Some(not_blocking) = confirmed.iter().find(|name| !is_blocking(name)) {
        return refused(format!(
            "{not_blocking} is not waited for, so it is not locked out; '{SHOW_STATUS}' names the clusters that are"
        ));
    }
    let root = stage.root.to_string();
    let previous = annotations
        .lock_out
        .clone()
        .filter(|previous| previous.root == root);
    let mut lock_out = previous.unwrap_or_default();
    lock_out.root = root;
    match stage.phase {
        RotationPhase::Switched => lock_out.switched.extend(confirmed),
        RotationPhase::Announced | RotationPhase::Steady => lock_out.announced.extend(confirmed),
    }
    let value = serde_json::to_string(&lock_out).unwrap_or_default();
    let mut result = "The rotation continues without:\n".to_owned();
    for BlockingMember { name, .. } in &blocking {
        result +=
            &format!("  {name}: run 'kubectl krypton join {name}' and enroll its agent again\n");
    }
    Ok((LOCK_OUT_ANNOTATION, value, result))
}

/// The message if the user has not named each cluster that the rotation would lock out.
fn unconfirmed_message(blocking: &[BlockingMember]) -> String {
    let names: Vec<&str> = blocking.iter().map(|member| member.name.as_str()).collect();
    let reasons = blocking
        .iter()
        .map(|member| format!("{} ({member})", member.name));
    let reasons: Vec<String> = reasons.collect();
    format!(
        "{} cluster{} will have to join again, and you must name each: {}; to confirm, run 'kubectl krypton rotate-ca --force --lock-out={}'",
        blocking.len(),
        if blocking.len() == 1 { "" } else { "s" },
        reasons.join(", "),
        names.join(",")
    )
}

fn status_output(
    annotations: &CaAnnotations,
    members: &[EdgeCluster],
    now: Timestamp,
) -> CommandOutput {
    let mut stdout = match &annotations.rotation_state {
        Some(rotation_state) => {
            let ago = age(rotation_state.since, now);
            let root: String = one_line(&rotation_state.root).chars().take(16).collect();
            let phase = match rotation_state.phase {
                RotationPhase::Steady => format!(
                    "No rotation of the CA is in progress; the last one ended {ago} ago with the root"
                ),
                RotationPhase::Announced => format!(
                    "Announced {ago} ago: agents receive the new root; when all trust it, it signs. It is"
                ),
                RotationPhase::Switched => format!(
                    "Switched {ago} ago: the new root signs, and agents renew; when all have, the hub drops the previous one. The new one is"
                ),
            };
            format!("{phase} {root}.\n")
        }
        None => "No rotation of the CA is in progress, and there has been none.\n".to_owned(),
    };
    let mut stderr = String::new();
    if let Some(requested) = annotations.requested {
        let ago = age(requested, now);
        stdout += &format!("A rotation was requested {ago} ago and is about to start.\n");
        let waiting_time = Duration::try_from(now.duration_since(requested)).unwrap_or_default();
        if waiting_time > ACCEPTANCE_DEADLINE {
            stderr = "No hub has accepted it: check that a hub runs, and that its version can rotate its CA.\n".to_owned();
        }
    }
    let blocking = annotations
        .stage()
        .map(|stage| blocking_members(stage, members, now));
    match blocking.as_deref() {
        None => {}
        Some([]) => stdout += "No cluster blocks the rotation.\n",
        Some(blocking) => {
            let mut table = Table::new(["WAITING-FOR", "CONNECTED", "LAST-SEEN", "AGENT", "WHY"]);
            for member in blocking {
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
    CommandOutput { stdout, stderr }
}

#[derive(Clone, Debug, Default)]
struct CaAnnotations {
    rotation_state: Option<RotationState>,
    requested: Option<Timestamp>,
    lock_out: Option<LockOut>,
}

impl CaAnnotations {
    fn from_metadata(secret: &PartialObjectMeta<Secret>) -> Self {
        let text = |key| secret.metadata.annotations.as_ref()?.get(key);
        let requested = text(REQUEST_ANNOTATION);
        Self {
            rotation_state: text(ROTATION_STATE_ANNOTATION)
                .and_then(|text| serde_json::from_str(text).ok()),
            requested: requested.map(|text| text.parse().unwrap_or(Timestamp::UNIX_EPOCH)),
            lock_out: text(LOCK_OUT_ANNOTATION).and_then(|text| serde_json::from_str(text).ok()),
        }
    }

    /// The stage of a rotation that is in progress.
    fn stage(&self) -> Option<RotationStage> {
        let rotation_state = self.rotation_state.as_ref()?;
        let root = rotation_state.root.parse().ok()?;
        let phase = rotation_state.phase;
        (phase != RotationPhase::Steady).then_some(RotationStage { phase, root })
    }
}

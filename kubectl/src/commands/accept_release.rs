//! `kubectl krypton accept-release`: accepts a stored release that Krypton does not trust.

use clap::Args;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{ReleaseRecord, name};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, Status};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::error_chain::chain;
use kube::api::{ListParams, PostParams};

use crate::error::KubectlError;
use crate::home::Target;
use crate::render::CommandOutput;

const EXAMPLES: &str = "\
Examples:
  # Trust the release that the condition ReleaseTampered names
  kubectl krypton accept-release RELEASE -n NAMESPACE";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AcceptRelease {
    /// Name of the Helm release, as the condition ReleaseTampered shows it
    #[arg(value_name = "RELEASE")]
    name: String,
}

pub(crate) async fn run(
    args: AcceptRelease,
    target: &Target<'_>,
) -> Result<CommandOutput, KubectlError> {
    let cluster = target.connect().await?;
    let key = ReleaseKey {
        namespace: cluster.objects_namespace(target.args.namespace.as_deref()),
        name: args.name,
    };
    let secrets = cluster.namespaced::<Secret>(&key.namespace);
    let params = ListParams::default().labels(&releases::secrets_selector(&key.name));
    let release_secrets = secrets.list(params).await?.into_iter();
    let revisions = release_secrets
        .filter_map(|secret| Some((Revision::from_metadata(&secret.metadata)?.1, secret)));
    // The newest one that is deployed, otherwise the newest.
    let selected = revisions.max_by_key(|(revision, _)| {
        let is_deployed = revision.status == Status::Deployed;
        (is_deployed, revision.revision)
    });
    let Some((revision, secret)) = selected else {
        return Err(secrets.not_found("Helm release", &key.name));
    };
    let failed = |error: &dyn std::error::Error| KubectlError::Failed(chain(error));
    let digest = releases::digest(&secret).map_err(|error| failed(&error))?;
    let records = cluster.namespaced::<Secret>(SYSTEM_NAMESPACE);
    let record_name = name(&key);
    let mut record = ReleaseRecord::from_secret(records.find(&record_name).await?, &key);
    record.digests.insert(revision.revision, digest);
    let secret = record.to_secret(&key).map_err(|error| failed(&error))?;
    // An existing record carries the resourceVersion that was read.
    if record.exists() {
        let params = PostParams::default();
        let replacing = records.api.replace(&record_name, &params, &secret);
        records.call("update", &record_name, replacing).await?;
    } else {
        records.create(&record_name, &secret).await?;
    }
    Ok(CommandOutput {
        stdout: format!(
            "revision {} of release {} in namespace {} accepted\n",
            revision.revision, key.name, key.namespace
        ),
        stderr:
            "To reconcile it now, run kubectl krypton resync for its Tenant or KryptonDeployment.\n"
                .to_owned(),
    })
}

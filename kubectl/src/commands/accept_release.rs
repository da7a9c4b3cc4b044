//! `kubectl krypton accept-release`: vouches for a stored release that Krypton refuses to act on.

use clap::Args;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{ReleaseRecord, name};
use krypton_helm::releases::revision::Revision;
use krypton_helm::releases::{self, Status};
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::error_chain::chain;
use krypton_types::names::namespace_name;
use kube::api::{Api, ListParams, PostParams};
use kube::core::ApiResource;

use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, HomeArgs, Place};
use crate::render::Printed;

#[derive(Clone, Debug, Args)]
pub(crate) struct AcceptRelease {
    /// Name of the Helm release, as the condition ReleaseTampered shows it.
    #[arg(value_name = "RELEASE")]
    name: String,
    /// Workspace of the release; by default the namespace of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

pub(crate) async fn run(
    args: AcceptRelease,
    cluster: &Connection,
) -> Result<Printed, KubectlError> {
    let key = ReleaseKey {
        namespace: args.namespace.unwrap_or_else(|| cluster.namespace.clone()),
        name: args.name,
    };
    let kind = ApiResource::erase::<Secret>(&());
    let place = Place::Namespace(key.namespace.clone());
    let failed = |verb, error| call_failed(error, verb, &kind, &place, &cluster.context);
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), &key.namespace);
    let revisions = ListParams::default().labels(&format!("owner=helm,name={}", key.name));
    let listed = cluster.in_time(secrets.list(&revisions)).await?;
    let listed = listed.map_err(|error| failed("list", error))?.items;
    let mut revisions: Vec<(Revision, Secret)> = listed
        .into_iter()
        .filter_map(|secret| Some((Revision::of(&secret.metadata)?.1, secret)))
        .collect();
    revisions.sort_by_key(|(revision, _)| revision.revision);
    let deployed = revisions
        .iter()
        .rfind(|(revision, _)| revision.status == Status::Deployed);
    let Some((revision, secret)) = deployed.or(revisions.last()) else {
        return Err(cluster.not_found("Helm release", &key.name, &place));
    };
    let digest = releases::digest(secret).map_err(|error| KubectlError::Release {
        reason: chain(&error),
    })?;
    let records: Api<Secret> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let found = cluster.in_time(records.get_opt(&name(&key))).await?;
    let mut record = ReleaseRecord::of(found.map_err(|error| failed("get", error))?, &key);
    record.digests.insert(revision.revision, digest);
    let secret = record
        .to_secret(&key)
        .map_err(|error| KubectlError::Release {
            reason: error.to_string(),
        })?;
    let params = PostParams::default();
    // What was read carries its resourceVersion.
    let written = match record.exists() {
        true => {
            cluster
                .in_time(records.replace(&name(&key), &params, &secret))
                .await?
        }
        false => cluster.in_time(records.create(&params, &secret)).await?,
    };
    written.map_err(|error| failed("update", error))?;
    Ok(Printed {
        stdout: format!(
            "revision {} of release {} in namespace {} accepted\n",
            revision.revision, key.name, key.namespace
        ),
        stderr:
            "To reconcile it now, run kubectl krypton resync for its Tenant or KryptonDeployment.\n"
                .to_owned(),
    })
}

//! `kubectl krypton accept-release`: vouches for a stored release that Krypton refuses to act on.

use clap::Args;
use k8s_openapi::api::core::v1::Secret;
use krypton_agent::index::Revision;
use krypton_agent::release::labels::ReleaseKey;
use krypton_agent::release::{self, Status};
use krypton_agent::release_record::ReleaseRecord;
use krypton_common::error_chain::chain;
use krypton_common::names::namespace_name;
use kube::api::{Api, ListParams};
use kube::core::ApiResource;

use super::{Connection, HomeArgs, KubectlError, Place, Printed, explain};

#[derive(Clone, Debug, Args)]
pub(super) struct AcceptRelease {
    /// Name of the Helm release, as the condition ReleaseTampered shows it.
    #[arg(value_name = "RELEASE")]
    name: String,
    /// Workspace of the release; by default the namespace of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    #[command(flatten)]
    pub(super) home: HomeArgs,
}

pub(super) async fn run(
    args: AcceptRelease,
    cluster: &Connection,
) -> Result<Printed, KubectlError> {
    let key = ReleaseKey {
        namespace: args.namespace.unwrap_or_else(|| cluster.namespace.clone()),
        name: args.name,
    };
    let kind = ApiResource::erase::<Secret>(&());
    let place = Place::Namespace(key.namespace.clone());
    let failed = |verb, error| explain(error, verb, &kind, &place, &cluster.context);
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
    let digest = release::digest(secret).map_err(|error| KubectlError::Release {
        reason: chain(&error),
    })?;
    let client = &cluster.client;
    let record = cluster.in_time(ReleaseRecord::read(client, &key)).await?;
    let mut record = record.map_err(|error| failed("get", error))?;
    record.digests.insert(revision.revision, digest);
    let written = cluster.in_time(record.write(client, &key)).await?;
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

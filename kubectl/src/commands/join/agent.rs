//! `join --agent-context`: installs the agent on its cluster, and waits until it is connected.

use std::time::Duration;

use krypton_runtime::lease::SYSTEM_NAMESPACE;
use kube::api::DynamicObject;

use crate::commands::install::bundle_flag;
use crate::error::KubectlError;
use crate::helm::ChartRelease;
use crate::home::Connection;
use crate::objects::condition;
use crate::program::Program;
use crate::tool::temporary_file;

const INTERVAL: Duration = Duration::from_secs(2);

/// Installs the agent with this bundle. `values` are Helm's own flags.
pub(super) async fn install(
    release: &ChartRelease<'_>,
    cluster: &Connection,
    bundle: &str,
    chart: Option<&str>,
    mut values: Vec<[String; 2]>,
) -> Result<(), KubectlError> {
    let file = temporary_file("the bundle", bundle)?;
    values.push(bundle_flag(&file));
    release.install(cluster, chart, &values).await.map(drop)
}

/// Waits until the home cluster shows the member as connected.
pub(super) async fn wait_until_connected(
    home: &Connection,
    name: &str,
    deadline: Duration,
) -> Result<(), KubectlError> {
    let members = home.members();
    let check = |member: Option<DynamicObject>| Ok(member.filter(is_connected).map(drop));
    let connected = members.wait_for(name, (INTERVAL, deadline), check).await?;
    connected.ok_or_else(|| {
        KubectlError::NoResponse(format!(
            "the agent of {name} is installed, but has not connected to the hub within {} s; look at its log: kubectl -n {SYSTEM_NAMESPACE} logs deployment/{}, with the context of its cluster",
            deadline.as_secs(),
            Program::Agent.container()
        ))
    })
}

fn is_connected(member: &DynamicObject) -> bool {
    condition(member, "Connected").is_some_and(|connected| connected["status"] == "True")
}

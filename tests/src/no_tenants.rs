//! A cluster whose administrator prohibits the CRD of Tenants.

use anyhow::{Result, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use kube::{Api, CustomResourceExt, api::PostParams};

use crate::{cluster::Cluster, wait::eventually};

const DENY_POLICY: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: no-tenants}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [apiextensions.k8s.io]
        apiVersions: [v1]
        operations: [CREATE]
        resources: [customresourcedefinitions]
  validations:
    - expression: "!object.metadata.name.startsWith('tenants.')"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: no-tenants}
spec: {policyName: no-tenants, validationActions: [Deny]}
"#;

/// Makes the API server reject the CRD.
pub async fn reject_tenant_crd(cluster: &Cluster) -> Result<()> {
    cluster.apply(DENY_POLICY).await?;
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    eventually("the CRD of Tenants to be rejected", async || {
        let created = crds.create(&params, Tenant::crd()).await;
        Ok(created.is_err().then_some(()))
    })
    .await
}

/// Asserts that the CRD doesn't exist.
pub async fn assert_no_tenant_crd(cluster: &Cluster) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(cluster.client());
    match crds.get_opt(Tenant::crd_name()).await? {
        None => Ok(()),
        Some(_) => bail!("{} has the CRD of Tenants", cluster.name()),
    }
}
